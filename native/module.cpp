// The extension `shared._native`.  Types are in `_native.pyi`; binding.hpp says which files know Python.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binding.hpp"
#include "budget.hpp"
#include "crc32.hpp"
#include "error.hpp"
#include "host_slab.hpp"
#include "sha256.hpp"
#include "version_slot.hpp"

using namespace changeover;
using namespace nb::literals;

namespace {

// A contiguous view of a Python object's bytes, held for the length of a call.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }

  std::span<const std::byte> bytes() const noexcept {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

template <typename Isa>
struct NamedIsa {
  const char* name;
  Isa isa;
};
constexpr NamedIsa<CrcIsa> kCrcIsas[] = {{"portable", CrcIsa::portable},
                                         {"pclmul", CrcIsa::pclmul},
                                         {"vpclmul256", CrcIsa::vpclmul256},
                                         {"vpclmul512", CrcIsa::vpclmul512}};
constexpr NamedIsa<ShaIsa> kShaIsas[] = {{"portable", ShaIsa::portable}, {"shani", ShaIsa::shani}, {"avx512", ShaIsa::avx512}};

template <typename Isa, std::size_t N>
Isa find_isa(const NamedIsa<Isa> (&isas)[N], const std::optional<std::string>& name, Isa best) {
  if (!name) return best;
  for (const auto& entry : isas) {
    if (*name == entry.name && is_available(entry.isa)) return entry.isa;
  }
  throw nb::value_error(("this processor has no '" + *name + "'").c_str());
}

template <typename Isa, std::size_t N>
std::vector<std::string> available_isas(const NamedIsa<Isa> (&isas)[N]) {
  std::vector<std::string> names;
  for (const auto& entry : isas) {
    if (is_available(entry.isa)) names.emplace_back(entry.name);
  }
  return names;
}

std::uint32_t py_crc32(nb::handle data, std::uint32_t value, const std::optional<std::string>& isa) {
  const CrcIsa chosen = find_isa(kCrcIsas, isa, best_crc_isa());
  const Buffer buffer(data);
  const ReleaseGil released;
  return crc32(buffer.bytes(), value, chosen);
}

nb::bytes py_sha256(nb::handle data, const std::optional<std::string>& isa) {
  const ShaIsa chosen = find_isa(kShaIsas, isa, best_sha_isa());
  const Buffer buffer(data);
  Sha256Digest digest;
  {
    const ReleaseGil released;
    digest = sha256(buffer.bytes(), chosen);
  }
  return nb::bytes(digest.data(), digest.size());
}

nb::bytes py_sha256_leaves(nb::handle data, std::uint64_t leaf_bytes, const std::optional<std::string>& isa) {
  check_leaf_bytes(leaf_bytes);
  const ShaIsa chosen = find_isa(kShaIsas, isa, best_sha_isa());
  const Buffer buffer(data);
  nb::bytes digests = new_bytes(leaf_count(buffer.bytes().size(), leaf_bytes) * kSha256Bytes);
  {
    const ReleaseGil released;
    sha256_leaves(buffer.bytes(), leaf_bytes, fill(digests), chosen);
  }
  return digests;
}

using ByteView = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

ByteView slab_view(const HostSlab& slab, std::uint64_t offset, std::uint64_t nbytes) {
  using Owner = std::shared_ptr<const Region>;
  auto owner = std::make_unique<Owner>(slab.share());
  const auto bytes = (*owner)->mapping.range(offset, nbytes);
  nb::capsule capsule(owner.get(), [](void* address) noexcept { delete static_cast<Owner*>(address); });
  static_cast<void>(owner.release());
  return ByteView(bytes.data(), {bytes.size()}, capsule);
}

std::unique_ptr<HostSlab> import_slab(Budget& budget, const std::string& slab_id, std::uint64_t nbytes,
                                      int take_fd) {
  return HostSlab::import(budget, slab_id, nbytes, UniqueFd(take_fd));
}

// Raise a class of `shared.errors`.
template <typename... Arguments>
void raise(const char* name, Arguments&&... arguments) {
  try {
    const nb::object type = nb::module_::import_("shared.errors").attr(name);
    const nb::object error = type(std::forward<Arguments>(arguments)...);
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (nb::python_error& failure) {
    failure.restore();
  }
}

void translate(const std::exception_ptr& failure, void*) {
  try {
    std::rethrow_exception(failure);
  } catch (const ReadError& e) {
    raise("ReadFailed", e.call(), e.number(), e.detail(), e.file_offset());
  } catch (const SystemError& e) {
    raise("DriverError", e.call(), e.number(), e.detail());
  } catch (const BudgetExceeded& e) {
    raise("OutOfMemory", "what"_a = "a slab within the memory limit",
          "needed_bytes"_a = e.needed_bytes(), "free_bytes"_a = e.free_bytes());
  } catch (const DeviceMemoryExceeded& e) {
    raise("OutOfMemory", "what"_a = e.what(), "needed_bytes"_a = e.needed_bytes(),
          "free_bytes"_a = e.free_bytes());
  } catch (const DriverMissing& e) {
    raise("DriverMissing", e.what());
  } catch (const ForeignHandle& e) {
    raise("ProtocolError", e.what());
  } catch (const Misuse& e) {
    raise("InvariantError", e.what());
  }
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native core of changeover.";
  nb::register_exception_translator(translate);
  // A process may end with slabs open; the kernel takes them back, and a report of leaks on stderr
  // would only alarm whoever reads the journal.
  nb::set_leak_warnings(false);

  m.def("crc32", &py_crc32, "data"_a, "value"_a = 0, nb::kw_only(), "isa"_a = nb::none());
  m.def("crc32_combine", &crc32_combine, "first"_a, "second"_a, "second_nbytes"_a);
  m.def("sha256", &py_sha256, "data"_a, nb::kw_only(), "isa"_a = nb::none());
  m.def("sha256_leaves", &py_sha256_leaves, "data"_a, "leaf_bytes"_a, nb::kw_only(), "isa"_a = nb::none());
  m.def("crc32_isas", [] { return available_isas(kCrcIsas); });
  m.def("sha256_isas", [] { return available_isas(kShaIsas); });

  nb::class_<Budget>(m, "Budget")
      // Not nb::init: reservations share the budget's ownership, so a shared pointer must hold it.
      .def(nb::new_([](std::optional<std::uint64_t> limit) { return std::make_shared<Budget>(limit); }),
           "limit_bytes"_a = nb::none())
      .def_prop_ro("used_bytes", &Budget::used_bytes)
      .def_prop_ro("free_bytes", &Budget::free_bytes);

  nb::class_<HostSlab> host_slab(m, "HostSlab");
  bind_readable(host_slab);
  host_slab.def("view", &slab_view, "offset_bytes"_a, "nbytes"_a);

  nb::class_<WritableHostSlab> writable_host_slab(m, "WritableHostSlab");
  bind_writable(writable_host_slab);
  writable_host_slab.def_prop_ro("missing_bytes", &WritableHostSlab::missing_bytes);

  m.def("create_host_slab", &WritableHostSlab::create, "budget"_a, "slab_id"_a, "nbytes"_a,
        nb::call_guard<ReleaseGil>());
  m.def("import_host_slab", &import_slab, "budget"_a, "slab_id"_a, "nbytes"_a, "take_fd"_a,
        nb::call_guard<ReleaseGil>());

  bind_cuda(m);

  nb::class_<VersionSlot>(m, "VersionSlot")
      .def(nb::init<>())
      .def_ro_static("SLOTS", &VersionSlot::kSlots)
      .def("acquire", &VersionSlot::acquire)
      .def("try_acquire", &VersionSlot::try_acquire, "slot"_a)
      .def("release", &VersionSlot::release, "slot"_a)
      .def("publish", &VersionSlot::publish, "slot"_a)
      .def("retract", &VersionSlot::retract)
      .def("close", &VersionSlot::close, "slot"_a)
      .def("open", &VersionSlot::open, "slot"_a)
      .def("reopen", &VersionSlot::reopen, "slot"_a)
      .def("is_drained", &VersionSlot::is_drained, "slot"_a)
      .def("references", &VersionSlot::references, "slot"_a)
      .def("current", &VersionSlot::current);
}
