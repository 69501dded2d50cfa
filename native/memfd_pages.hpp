// Taking the pages of a memfd before anyone writes to them.
#pragma once

#include <cstdint>

#include "mapping.hpp"

namespace changeover {

// Have every page of the range exist, zero where nothing was written.  Huge pages where the kernel can
// (MADV_COLLAPSE, Linux 6.1, whatever the machine's policy for shared memory is): then filling, mapping and
// freeing takes some hundred steps per GiB, not 262,144.  `mapping` is of `borrow_memfd`.  Throws SystemError
// (ENOMEM, ENOSPC) where there is no memory.  Blocking; safe while others write.
void take_pages(const Mapping& mapping, int borrow_memfd, std::uint64_t offset, std::uint64_t nbytes);

}  // namespace changeover
