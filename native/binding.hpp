// What the files of the extension share.  Only they know Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "error.hpp"

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

inline void check_leaf_bytes(std::uint64_t leaf_bytes) {
  if (leaf_bytes == 0) throw Misuse("a leaf has at least one byte");
}

// Defined in cuda_module.cpp.
void bind_cuda(nb::module_& m);

}  // namespace changeover
