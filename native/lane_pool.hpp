// `LanePool`: what one thread needs for the length of a call, such as buffers and a stream.
//
// A lane is made when more threads call at once than ever before, and kept: there are never more lanes
// than there were threads.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

namespace changeover {

template <typename Lane>
class LanePool {
 public:
  // A lane for the length of a call; `make` answers a new one (unique_ptr) where none is idle.
  class Lease {
   public:
    template <typename Make>
    Lease(LanePool& pool, const Make& make) : pool_(pool), lane_(pool.take(make)) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
      const std::lock_guard lock(pool_.mutex_);
      pool_.idle_.push_back(&lane_);  // never grows: there is room for every lane
    }
    Lane& operator*() const noexcept { return lane_; }
    Lane* operator->() const noexcept { return &lane_; }

   private:
    LanePool& pool_;
    Lane& lane_;
  };

  // All lanes there are now, in use or not; they stay as long as the pool.
  std::vector<Lane*> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<Lane*> lanes;
    for (const auto& lane : lanes_) lanes.push_back(lane.get());
    return lanes;
  }

 private:
  template <typename Make>
  Lane& take(const Make& make) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        Lane& lane = *idle_.back();
        idle_.pop_back();
        return lane;
      }
    }
    std::unique_ptr<Lane> made = make();  // not under the lock: pinning memory takes milliseconds
    const std::lock_guard lock(mutex_);
    idle_.reserve(lanes_.size() + 1);
    lanes_.push_back(std::move(made));
    return *lanes_.back();
  }

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<Lane*> idle_;
};

}  // namespace changeover
