// The fake driver's devices and contexts.
#include <vector>

#include "check.hpp"
#include "fake_cuda_state.hpp"

using namespace changeover;
using namespace changeover::stress;
using cuda::Result;

namespace {

thread_local std::vector<int> contexts;  // devices, the current one last

Result init(unsigned) { return 0; }
Result driver_version(int* version) { return *version = 13000, 0; }
Result error_name(Result, const char** name) { return *name = "CUDA_ERROR_PLANTED", 0; }
Result error_string(Result, const char** words) { return *words = "planted", 0; }
Result device_count(int* count) { return *count = kDevices, 0; }
Result device_get(cuda::Device* device, int ordinal) { return *device = ordinal, 0; }
Result device_uuid(cuda::Uuid* uuid, cuda::Device device) {
  for (unsigned char i = 0; i < 16; ++i) uuid->bytes[i] = i;
  uuid->bytes[0] = static_cast<unsigned char>(device);
  return 0;
}
Result device_attribute(int* value, int, cuda::Device) { return *value = 1, 0; }
Result device_can_access_peer(int* can, cuda::Device device, cuda::Device other) {
  CHECK(device != other);
  MAY_FAIL("cuDeviceCanAccessPeer");
  return *can = s.has_peer_access ? 1 : 0, 0;
}
Result context_retain(cuda::Context* context, cuda::Device device) {
  return *context = reinterpret_cast<cuda::Context>(static_cast<std::intptr_t>(device) + 1), 0;
}
Result context_push(cuda::Context context) { return contexts.push_back(device_of(context)), 0; }
Result context_pop(cuda::Context*) {
  CHECK(!contexts.empty());
  return contexts.pop_back(), 0;
}
Result context_synchronize() {
  MAY_FAIL("cuCtxSynchronize");
  CHECK(!s.is_capturing);
  carry_out(s, [](const Work&) { return true; });
  return 0;
}
Result priority_range(int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }
Result context_record_event(cuda::Context, cuda::Event event) {
  LOCKED;
  CHECK(!s.is_capturing);  // the capture would be lost
  CHECK(s.events.contains(event));
  s.events[event] = {s.sequence, nullptr, true};
  return 0;
}

Result mem_info(std::size_t* free, std::size_t* total) {
  LOCKED;
  *free = s.free_bytes.at(static_cast<std::size_t>(current_device()));
  *total = kDeviceBytes;
  return 0;
}

}  // namespace

namespace changeover::stress {

int current_device() {
  CHECK(!contexts.empty());
  return contexts.back();
}
int device_of(cuda::Context context) { return static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1; }

Entries device_entries() {
  return {
      {"cuInit", erased(&init)},
      {"cuDriverGetVersion", erased(&driver_version)},
      {"cuGetErrorName", erased(&error_name)},
      {"cuGetErrorString", erased(&error_string)},
      {"cuDeviceGetCount", erased(&device_count)},
      {"cuDeviceGet", erased(&device_get)},
      {"cuDeviceGetUuid", erased(&device_uuid)},
      {"cuDeviceGetAttribute", erased(&device_attribute)},
      {"cuDeviceCanAccessPeer", erased(&device_can_access_peer)},
      {"cuDevicePrimaryCtxRetain", erased(&context_retain)},
      {"cuCtxPushCurrent", erased(&context_push)},
      {"cuCtxPopCurrent", erased(&context_pop)},
      {"cuCtxSynchronize", erased(&context_synchronize)},
      {"cuCtxGetStreamPriorityRange", erased(&priority_range)},
      {"cuCtxRecordEvent", erased(&context_record_event)},
      {"cuMemGetInfo", erased(&mem_info)},
  };
}

}  // namespace changeover::stress
