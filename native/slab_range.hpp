// Part of a slab.
#pragma once

#include <cstdint>

namespace changeover {

struct SlabRange {
  std::uint64_t offset;
  std::uint64_t nbytes;
};

}  // namespace changeover
