// What the files of the extension share.  Only they know Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "error.hpp"
#include "extent_reader.hpp"
#include "sha256.hpp"
#include "slab_range.hpp"

namespace changeover {

namespace nb = nanobind;

using ReleaseGil = nb::gil_scoped_release;

// A bytes object that is filled before anyone else sees it.
inline nb::bytes new_bytes(std::uint64_t nbytes) {
  PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes));
  if (object == nullptr) throw nb::python_error();
  return nb::steal<nb::bytes>(object);
}

inline std::span<std::byte> fill(nb::bytes& object) {
  return {reinterpret_cast<std::byte*>(PyBytes_AS_STRING(object.ptr())), object.size()};
}

// Where the pieces of a read belong: (offset, bytes) each.
using Places = std::vector<std::tuple<std::uint64_t, std::uint64_t>>;

// Read a file into a slab of any backend, without the GIL; the CRC32 of each piece.
template <typename WritableSlab>
std::vector<std::uint32_t> read_pieces(WritableSlab& slab, int borrow_fd, std::uint64_t file_offset,
                                       const Places& places) {
  const ReleaseGil released;
  std::vector<Piece> pieces;
  pieces.reserve(places.size());
  for (const auto& [offset, nbytes] : places) pieces.push_back({offset, nbytes});
  slab.read_file(borrow_fd, file_offset, pieces);
  std::vector<std::uint32_t> crcs;
  crcs.reserve(pieces.size());
  for (const Piece& piece : pieces) crcs.push_back(piece.crc);
  return crcs;
}

constexpr std::uint64_t kLongestSpreadNs = 60'000'000'000;

inline void check_leaf_bytes(std::uint64_t leaf_bytes) {
  if (leaf_bytes == 0) throw Misuse("a leaf has at least one byte");
}

// The SHA-256 leaves of all ranges of a slab, and their checksums if asked for; without the GIL.
template <typename Slab>
nb::bytes slab_leaves(const Slab& slab, const Places& places, std::uint64_t leaf_bytes, std::uint64_t spread_ns,
                      std::vector<std::uint32_t>* crcs = nullptr) {
  check_leaf_bytes(leaf_bytes);
  const auto spread = std::chrono::nanoseconds(std::min(spread_ns, kLongestSpreadNs));
  std::vector<SlabRange> ranges;
  ranges.reserve(places.size());
  std::uint64_t leaves = 0;
  for (const auto& [offset, nbytes] : places) {
    slab.check_range(offset, nbytes);  // before anything is sized by it
    ranges.push_back({offset, nbytes});
    leaves += leaf_count(nbytes, leaf_bytes);
  }
  if (crcs != nullptr) crcs->resize(ranges.size());
  nb::bytes digests = new_bytes(leaves * kSha256Bytes);
  {
    const ReleaseGil released;
    slab.digest(ranges, leaf_bytes, fill(digests), crcs != nullptr ? std::span(*crcs) : std::span<std::uint32_t>{},
                spread);
  }
  return digests;
}

// What slabs of all backends do alike.
template <typename Slab>
void bind_readable(nb::class_<Slab>& slab) {
  using namespace nb::literals;
  slab.def_prop_ro("nbytes", &Slab::nbytes)
      .def_prop_ro("is_open", &Slab::is_open)
      .def("borrow_fd", &Slab::borrow_fd)
      .def("crc32", &Slab::crc32, "offset_bytes"_a, "nbytes"_a, nb::call_guard<ReleaseGil>())
      .def("sha256_leaves_of",
           [](const Slab& self, const Places& ranges, std::uint64_t leaf_bytes, std::uint64_t spread_ns) {
             return slab_leaves(self, ranges, leaf_bytes, spread_ns);
           },
           "ranges"_a, "leaf_bytes"_a, "spread_ns"_a = 0)
      .def("digests_of",
           [](const Slab& self, const Places& ranges, std::uint64_t leaf_bytes, std::uint64_t spread_ns) {
             std::vector<std::uint32_t> crcs;
             nb::bytes leaves = slab_leaves(self, ranges, leaf_bytes, spread_ns, &crcs);
             return std::make_pair(std::move(crcs), std::move(leaves));
           },
           "ranges"_a, "leaf_bytes"_a, "spread_ns"_a = 0)
      .def("close", &Slab::close, nb::call_guard<ReleaseGil>());
}

template <typename WritableSlab>
void bind_writable(nb::class_<WritableSlab>& slab) {
  using namespace nb::literals;
  slab.def_prop_ro("nbytes", &WritableSlab::nbytes)
      .def_prop_ro("is_open", &WritableSlab::is_open)
      .def("read_file",
           nb::overload_cast<int, std::uint64_t, std::uint64_t, std::uint64_t>(&WritableSlab::read_file),
           "borrow_fd"_a, "file_offset"_a, "offset_bytes"_a, "nbytes"_a, nb::call_guard<ReleaseGil>())
      .def("read_pieces", &read_pieces<WritableSlab>, "borrow_fd"_a, "file_offset"_a, "pieces"_a)
      .def("seal", &WritableSlab::seal, nb::call_guard<ReleaseGil>())
      .def("close", &WritableSlab::close, nb::call_guard<ReleaseGil>());
}

// Defined in cuda_module.cpp.
void bind_cuda(nb::module_& m);

}  // namespace changeover
