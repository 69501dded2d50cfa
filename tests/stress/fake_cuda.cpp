// The fake driver as it is opened, and its controls.
#include "fake_cuda.hpp"

#include <algorithm>
#include <utility>

#include "check.hpp"
#include "fake_cuda_state.hpp"

using namespace changeover;
using namespace changeover::stress;
using cuda::Result;

namespace changeover::stress {

State& state() {
  static State* const made = new State;
  return *made;
}

Result planned(State& s, const char* entry) {
  ++s.calls;
  if (s.call_in > 0 && --s.call_in == 0) return s.call_result;
  const auto found = s.entries.find(entry);
  if (found != s.entries.end() && --found->second.first == 0) {
    const Result result = found->second.second;
    s.entries.erase(found);
    return result;
  }
  return cuda::kSuccess;
}

}  // namespace changeover::stress

namespace {

Result unsupported() { return kNotSupported; }

Entries all_entries() {
  Entries entries = device_entries();
  entries.merge(memory_entries());
  entries.merge(work_entries());
  return entries;
}

void* find(const std::string& name) {
  static const Entries entries = all_entries();
  const auto found = entries.find(name);
  return found == entries.end() ? erased(&unsupported) : found->second;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Result cuGetProcAddress_v2(const char* name, void** function, int,
                                                                            unsigned long long, int*) {
  *function = find(name);
  return cuda::kSuccess;
}

extern "C" __attribute__((visibility("default"))) const FakeCuda& fake_cuda() {
  static const FakeCuda control{
      .fail_call =
          [](int nth, int result) {
            LOCKED;
            s.call_in = nth;
            s.call_result = result;
            s.calls = 0;
          },
      .fail_entry =
          [](const char* entry, int nth, int result) {
            LOCKED;
            s.entries[entry] = {nth, result};
          },
      .calls =
          [] {
            LOCKED;
            return s.calls;
          },
      .submit_read =
          [](std::uint64_t address, std::uint64_t nbytes) {
            LOCKED;
            s.pending.push_back({++s.sequence, nullptr, address, nbytes, nullptr});
          },
      .pending =
          [] {
            LOCKED;
            return s.pending.size();
          },
      .access =
          [](std::uint64_t address) {
            LOCKED;
            CHECK(s.mappings.contains(address));
            return std::ranges::max(s.mappings[address].access);
          },
      .live =
          [] {
            LOCKED;
            return s.handles.size() + s.reservations.size() + s.mappings.size() + s.events.size() +
                   s.streams.size() + s.pinned.size();
          },
      .set_free_bytes =
          [](std::uint64_t nbytes) {
            LOCKED;
            s.free_bytes.fill(nbytes);
          },
      .set_peer_access =
          [](bool is_possible) {
            LOCKED;
            s.has_peer_access = is_possible;
          },
      .set_batches =
          [](bool is_possible) {
            LOCKED;
            s.has_batches = is_possible;
          },
      .stall =
          [](bool is_stalled) {
            LOCKED;
            s.is_stalled = is_stalled;
          },
      .take_batches =
          [] {
            LOCKED;
            return std::exchange(s.batches, {});
          },
      .set_capturing =
          [](bool is_capturing) {
            LOCKED;
            s.is_capturing = is_capturing;
          },
  };
  return control;
}
