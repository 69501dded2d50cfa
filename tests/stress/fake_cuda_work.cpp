// The fake driver's work: copies, the host memory that they are from, and the streams and events that order them.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "check.hpp"
#include "fake_cuda_state.hpp"

using namespace changeover;
using namespace changeover::stress;
using cuda::Result;

namespace {

// Work for a stream is given by who has its device's context.
void check_stream(State& s, cuda::Stream stream) {
  CHECK(s.streams.contains(stream) && s.streams[stream] == current_device());
}

Result host_alloc(void** address, std::size_t nbytes, unsigned) {
  MAY_FAIL("cuMemHostAlloc");
  *address = ::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  s.pinned[*address] = nbytes;
  return 0;
}
Result host_free(void* address) {
  LOCKED;
  CHECK(s.pinned.contains(address));
  for (const Work& work : s.pending) {
    const auto* const source = static_cast<const char*>(work.source);
    const auto* const first = static_cast<const char*>(address);
    CHECK(source == nullptr || source < first || source >= first + s.pinned[address]);
  }
  s.pinned.erase(address);
  ::free(address);
  return 0;
}
Result copy_to_device(cuda::DevicePointer to, const void* from, std::size_t nbytes, cuda::Stream stream) {
  MAY_FAIL("cuMemcpyHtoDAsync");
  check_stream(s, stream);
  CHECK(access_to(s, to, nbytes, current_device()) == cuda::kAccessReadWrite);
  s.batches.push_back(1);
  s.pending.push_back({++s.sequence, stream, to, nbytes, from});
  return 0;
}
Result copy_batch(cuda::DevicePointer* to, cuda::DevicePointer* from, std::size_t* nbytes, std::size_t count,
                  cuda::CopyAttributes* attributes, std::size_t* first, std::size_t attribute_count,
                  cuda::Stream stream) {
  MAY_FAIL("cuMemcpyBatchAsync");
  if (!s.has_batches) return kNotSupported;
  CHECK(count > 0 && attribute_count == 1 && *first == 0);
  check_stream(s, stream);
  CHECK(attributes->source_access_order == cuda::kSourceAccessInStreamOrder);
  s.batches.push_back(count);
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(access_to(s, to[i], nbytes[i], current_device()) == cuda::kAccessReadWrite);
    s.pending.push_back({++s.sequence, stream, to[i], nbytes[i], as_pointer(from[i])});
  }
  return 0;
}
// The device of the stream needs access to both ends.
Result copy_on_device(cuda::DevicePointer to, cuda::DevicePointer from, std::size_t nbytes, cuda::Stream stream) {
  MAY_FAIL("cuMemcpyDtoDAsync");
  check_stream(s, stream);
  CHECK(access_to(s, to, nbytes, current_device()) == cuda::kAccessReadWrite);
  CHECK(access_to(s, from, nbytes, current_device()) != 0);
  s.pending.push_back({++s.sequence, stream, to, nbytes, as_pointer(from)});
  return 0;
}
// Each device needs access to its own end.
Result copy_between(cuda::DevicePointer to, cuda::Context to_context, cuda::DevicePointer from,
                    cuda::Context from_context, std::size_t nbytes, cuda::Stream stream) {
  MAY_FAIL("cuMemcpyPeerAsync");
  check_stream(s, stream);
  CHECK(access_to(s, to, nbytes, device_of(to_context)) == cuda::kAccessReadWrite);
  CHECK(access_to(s, from, nbytes, device_of(from_context)) != 0);
  s.pending.push_back({++s.sequence, stream, to, nbytes, as_pointer(from)});
  return 0;
}
Result stream_create(cuda::Stream* stream, unsigned flags, int) {
  CHECK(flags == cuda::kStreamNonBlocking);
  MAY_FAIL("cuStreamCreateWithPriority");
  *stream = reinterpret_cast<cuda::Stream>(s.next_id++);
  s.streams[*stream] = current_device();
  return 0;
}
Result stream_destroy(cuda::Stream stream) {
  LOCKED;
  CHECK(s.streams.erase(stream) == 1);
  return 0;
}
Result stream_synchronize(cuda::Stream stream) {
  MAY_FAIL("cuStreamSynchronize");
  check_stream(s, stream);
  carry_out(s, [&](const Work& work) { return work.stream == stream; });
  return 0;
}
Result event_create(cuda::Event* event, unsigned) {
  MAY_FAIL("cuEventCreate");
  *event = reinterpret_cast<cuda::Event>(s.next_id++);
  s.events[*event] = {};
  return 0;
}
Result event_destroy(cuda::Event event) {
  LOCKED;
  CHECK(s.events.erase(event) == 1);
  return 0;
}
Result event_record(cuda::Event event, cuda::Stream stream) {
  MAY_FAIL("cuEventRecord");
  CHECK(s.events.contains(event));
  check_stream(s, stream);
  s.events[event] = {s.sequence, stream, false};
  return 0;
}
Result event_synchronize(cuda::Event event) {
  MAY_FAIL("cuEventSynchronize");
  CHECK(s.events.contains(event));
  const EventState recorded = s.events[event];
  carry_out(s, [&](const Work& work) {
    return work.sequence <= recorded.sequence && (recorded.is_of_context || work.stream == recorded.stream);
  });
  return 0;
}
// Each look carries out one piece of what is waited for.
Result event_query(cuda::Event event) {
  MAY_FAIL("cuEventQuery");
  CHECK(s.events.contains(event));
  const EventState recorded = s.events[event];
  CHECK(!recorded.is_of_context);
  if (s.is_stalled) return cuda::kNotReady;
  const auto next = std::ranges::find_if(s.pending, [&](const Work& work) {
    return work.sequence <= recorded.sequence && work.stream == recorded.stream;
  });
  if (next == s.pending.end()) return 0;
  const std::uint64_t sequence = next->sequence;
  carry_out(s, [&](const Work& work) { return work.sequence == sequence; });
  return cuda::kNotReady;
}

}  // namespace

namespace changeover::stress {

void carry_out(State& s, const std::function<bool(const Work&)>& is_due) {
  std::vector<Work> later;
  for (const Work& work : s.pending) {
    if (!is_due(work)) {
      later.push_back(work);
    } else if (work.source != nullptr) {
      std::memcpy(as_pointer(work.address), work.source, work.nbytes);
    } else {
      volatile const unsigned char* const from = static_cast<unsigned char*>(as_pointer(work.address));
      static_cast<void>(from[0] + from[work.nbytes - 1]);
    }
  }
  s.pending = std::move(later);
}

Entries work_entries() {
  return {
      {"cuMemHostAlloc", erased(&host_alloc)},
      {"cuMemFreeHost", erased(&host_free)},
      {"cuMemcpyHtoDAsync", erased(&copy_to_device)},
      {"cuMemcpyBatchAsync", erased(&copy_batch)},
      {"cuMemcpyDtoDAsync", erased(&copy_on_device)},
      {"cuMemcpyPeerAsync", erased(&copy_between)},
      {"cuStreamCreateWithPriority", erased(&stream_create)},
      {"cuStreamDestroy", erased(&stream_destroy)},
      {"cuStreamSynchronize", erased(&stream_synchronize)},
      {"cuEventCreate", erased(&event_create)},
      {"cuEventDestroy", erased(&event_destroy)},
      {"cuEventRecord", erased(&event_record)},
      {"cuEventQuery", erased(&event_query)},
      {"cuEventSynchronize", erased(&event_synchronize)},
  };
}

}  // namespace changeover::stress
