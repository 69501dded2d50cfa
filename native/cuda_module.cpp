// The part of the extension `shared._native` that is about CUDA.  Types are in `_native.pyi`.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.hpp"
#include "budget.hpp"
#include "cuda_device.hpp"
#include "cuda_driver.hpp"
#include "cuda_release.hpp"
#include "cuda_reserve.hpp"
#include "cuda_slab.hpp"
#include "cuda_staging.hpp"
#include "remapped_region.hpp"
#include "sha256.hpp"

namespace changeover {
namespace {

using namespace nb::literals;
using DeviceView = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cuda>;

// `owner` lives as long as anything made from the view.
template <typename Owner>
DeviceView view_of(std::shared_ptr<Owner> owner, int ordinal, cuda::DevicePointer address, std::uint64_t nbytes) {
  auto kept = std::make_unique<std::shared_ptr<Owner>>(std::move(owner));
  nb::capsule capsule(kept.get(),
                      [](void* memory) noexcept { delete static_cast<std::shared_ptr<Owner>*>(memory); });
  static_cast<void>(kept.release());
  return DeviceView(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address)), {nbytes}, capsule, {},
                    nb::dtype<std::uint8_t>(), nb::device::cuda::value, ordinal);
}

DeviceView slab_view(const CudaSlab& slab, std::uint64_t offset, std::uint64_t nbytes) {
  auto region = slab.share();
  const cuda::DevicePointer address = region->range(offset, nbytes);
  const int ordinal = region->device().ordinal();
  return view_of(std::move(region), ordinal, address, nbytes);
}

// The region and its views; views keep the addresses, `close` ends the region for new use.
class RemappedRegionOwner {
 public:
  RemappedRegionOwner(const std::string& uuid, std::uint64_t nbytes)
      : region_(std::make_shared<RemappedRegion>(CudaDevice::find(uuid), nbytes)) {}

  std::uint64_t nbytes() const { return region()->nbytes(); }
  bool is_open() const noexcept { return region_ != nullptr; }
  void exchange(const std::vector<const CudaSlab*>& slabs) {
    std::vector<std::shared_ptr<const CudaRegion>> regions;
    for (const CudaSlab* slab : slabs) regions.push_back(slab->share());
    region()->exchange(std::move(regions));
  }
  DeviceView view(std::uint64_t offset, std::uint64_t nbytes) const {
    return view_of(region(), region()->device().ordinal(), region()->range(offset, nbytes), nbytes);
  }
  void close() {
    region()->empty();
    region_.reset();
  }

 private:
  const std::shared_ptr<RemappedRegion>& region() const {
    if (!region_) throw Misuse("use of a region that is closed");
    return region_;
  }

  std::shared_ptr<RemappedRegion> region_;
};

std::unique_ptr<CudaReserve> make_reserve(const std::string& uuid, std::uint64_t piece_bytes) {
  return std::make_unique<CudaReserve>(CudaDevice::find(uuid), piece_bytes);
}

std::unique_ptr<ReleaseHold> make_hold(const std::string& uuid) {
  return std::make_unique<ReleaseHold>(CudaDevice::find(uuid));
}

std::vector<std::string> device_uuids() {
  std::vector<std::string> uuids;
  for (const auto& device : CudaDevice::all()) uuids.push_back(device->uuid());
  return uuids;
}

std::tuple<std::uint64_t, std::uint64_t> device_memory(const std::string& uuid) {
  CudaDevice& device = CudaDevice::find(uuid);
  device.releases().settle();
  const DeviceMemory memory = device.memory();
  return {memory.free_bytes, memory.total_bytes};
}

std::shared_ptr<CudaStaging> make_staging(const std::string& uuid, std::uint64_t slot_bytes, unsigned slots) {
  return std::make_shared<CudaStaging>(CudaDevice::find(uuid), slot_bytes, slots);
}

std::unique_ptr<CudaSlab> import_slab(Budget& budget, const std::string& uuid, const std::string& slab_id,
                                      std::uint64_t nbytes, int take_fd) {
  UniqueFd fd(take_fd);
  return CudaSlab::import(budget, CudaDevice::find(uuid), slab_id, nbytes, std::move(fd));
}

}  // namespace

void bind_cuda(nb::module_& m) {
  m.def("cuda_driver_version", [] { return CudaDriver::get().version(); });
  m.def("cuda_devices", &device_uuids, nb::call_guard<ReleaseGil>());
  m.def("cuda_device_ordinal", [](const std::string& uuid) { return CudaDevice::find(uuid).ordinal(); }, "uuid"_a);
  m.def("cuda_has_posix_fds", [](const std::string& uuid) { return CudaDevice::find(uuid).has_posix_fds(); },
        "uuid"_a);
  m.def("cuda_numa_node", [](const std::string& uuid) { return CudaDevice::find(uuid).numa_node(); }, "uuid"_a);
  m.def("cuda_granularity", [](const std::string& uuid) { return CudaDevice::find(uuid).granularity_bytes(); },
        "uuid"_a, nb::call_guard<ReleaseGil>());
  m.def("cuda_memory", &device_memory, "uuid"_a, nb::call_guard<ReleaseGil>());
  m.def("cuda_set_nvrtc_libraries", &CudaDevice::set_nvrtc_libraries, "paths"_a);

  nb::class_<ReleaseHold>(m, "CudaReleaseHold")
      .def(nb::new_(&make_hold), "uuid"_a, nb::call_guard<ReleaseGil>())
      .def("close", &ReleaseHold::close);

  nb::class_<CudaStaging>(m, "CudaStaging")
      .def(nb::new_(&make_staging), "uuid"_a, "slot_bytes"_a, "slots_per_lane"_a,
           nb::call_guard<ReleaseGil>());

  nb::class_<CudaReserve>(m, "CudaReserve")
      .def(nb::new_(&make_reserve), "uuid"_a, "piece_bytes"_a, nb::call_guard<ReleaseGil>())
      .def("resize", &CudaReserve::resize, "pieces"_a, nb::call_guard<ReleaseGil>())
      .def_prop_ro("pieces", &CudaReserve::pieces);

  nb::class_<CudaSlab> slab(m, "CudaSlab");
  bind_readable(slab);
  slab.def("view", &slab_view, "offset_bytes"_a, "nbytes"_a);

  nb::class_<WritableCudaSlab> writable_slab(m, "WritableCudaSlab");
  bind_writable(writable_slab);
  writable_slab.def("copy_from", &WritableCudaSlab::copy_from, "source"_a, nb::call_guard<ReleaseGil>());

  m.def("create_cuda_slab", &WritableCudaSlab::create, "budget"_a, "staging"_a, "slab_id"_a, "nbytes"_a,
        "is_legacy_ipc"_a, nb::call_guard<ReleaseGil>());
  m.def("import_cuda_slab", &import_slab, "budget"_a, "uuid"_a, "slab_id"_a, "nbytes"_a, "take_fd"_a,
        nb::call_guard<ReleaseGil>());

  nb::class_<RemappedRegionOwner>(m, "RemappedRegion")
      .def(nb::init<const std::string&, std::uint64_t>(), "uuid"_a, "nbytes"_a)
      .def_prop_ro("nbytes", &RemappedRegionOwner::nbytes)
      .def_prop_ro("is_open", &RemappedRegionOwner::is_open)
      .def("exchange", &RemappedRegionOwner::exchange, "slabs"_a, nb::call_guard<ReleaseGil>())
      .def("view", &RemappedRegionOwner::view, "offset_bytes"_a, "nbytes"_a)
      .def("close", &RemappedRegionOwner::close, nb::call_guard<ReleaseGil>());
}

}  // namespace changeover
