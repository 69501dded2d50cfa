// A CUDA driver with two devices and no GPU, stricter than a real one: device memory is memfds at real addresses.
//
// Built as a library with the driver's name, so that the code under test opens it as it would the real
// one.  Copies and other device work happen only when something waits for them or looks whether they are done: memory that is reused or
// unmapped too early shows.  Undoing what was not done, and unmapping under pending work, end the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace changeover::stress {

inline constexpr std::uint64_t kDeviceBytes = std::uint64_t{1} << 30;  // of each, until it is set

struct FakeCuda {
  // Let the n-th call from now on (1 is the next) of those that can fail answer `result`; 0 is never.
  void (*fail_call)(int nth, int result);
  // The same, counting calls of one entry point alone.
  void (*fail_entry)(const char* entry, int nth, int result);
  // Calls that could have failed since `fail_call`.
  int (*calls)();
  // Submit work that reads `nbytes` at `address`, on a stream that the code under test does not know.
  void (*submit_read)(std::uint64_t address, std::uint64_t nbytes);
  // Pieces of work that nobody has waited for yet.
  std::size_t (*pending)();
  // 0, 1 (read) or 3 (read and write), of the device that may do most; the program ends where nothing
  // is mapped.
  int (*access)(std::uint64_t address);
  // Handles, reservations, mappings, events, streams, pinned and plain allocations that are not undone.
  std::size_t (*live)();
  // Bytes that each device has left to give.
  void (*set_free_bytes)(std::uint64_t nbytes);
  // Whether the devices can use each other's memory; they can at first.
  void (*set_peer_access)(bool is_possible);
  // Whether several copies can be submitted in one call; they can at first.
  void (*set_batches)(bool is_possible);
  // Whether no work ends that is only looked at.
  void (*stall)(bool is_stalled);
  // How many copies to a device were in each call, since this was asked before.
  std::vector<std::size_t> (*take_batches)();
  // Whether a stream is being captured: whatever waits for a whole device ends the program then.
  void (*set_capturing)(bool is_capturing);
};

}  // namespace changeover::stress

extern "C" __attribute__((visibility("default"))) const changeover::stress::FakeCuda& fake_cuda();
