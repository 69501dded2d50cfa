// `Budget`: how much memory slabs may take; `Reservation`: one slab's share of it.
//
// A slab counts once however often it is held (created and imported by the same process, kept by a
// tensor after its owner closed it), and until the last holder is gone.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace changeover {

class Budget;

class Reservation {
 public:
  Reservation(Reservation&& other) noexcept = default;
  Reservation& operator=(Reservation&& other) noexcept;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation();

 private:
  friend class Budget;
  Reservation(std::shared_ptr<Budget> budget, std::string slab_id)
      : budget_(std::move(budget)), slab_id_(std::move(slab_id)) {}
  void give_back() noexcept;

  std::shared_ptr<Budget> budget_;
  std::string slab_id_;
};

class Budget : public std::enable_shared_from_this<Budget> {
 public:
  // Without a limit it only counts.
  explicit Budget(std::optional<std::uint64_t> limit_bytes) : limit_bytes_(limit_bytes) {}

  // Take `nbytes` for a new slab.  Throws BudgetExceeded, or Misuse if the slab is held already.
  Reservation reserve(const std::string& slab_id, std::uint64_t nbytes);

  // Count a slab whose memory exists already.  Never refuses: refusing would not free anything.
  Reservation adopt(const std::string& slab_id, std::uint64_t nbytes);

  std::uint64_t used_bytes() const;
  // What `reserve` would still grant; the largest value there is without a limit.
  std::uint64_t free_bytes() const;

 private:
  friend class Reservation;
  struct Holding {
    std::uint64_t nbytes;
    std::uint64_t holders;
  };

  std::uint64_t free_locked() const noexcept;
  void release(const std::string& slab_id) noexcept;

  const std::optional<std::uint64_t> limit_bytes_;
  mutable std::mutex mutex_;
  std::map<std::string, Holding> holdings_;
  std::uint64_t used_bytes_ = 0;
};

}  // namespace changeover
