"""What several kinds of tests need: small models, real daemons, and what the kernel knows of them."""
