"""The inference daemon: maps verified weights, serves from them and flips between two versions."""
