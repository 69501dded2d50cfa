// What the version slot refuses, and that a refusal changes nothing.
#include "check.hpp"
#include "version_slot.hpp"

using changeover::Misuse;
using changeover::VersionSlot;

namespace {

void nothing_is_current_at_first() {
  VersionSlot slot;
  CHECK(!slot.acquire() && !slot.current());
  CHECK(!slot.try_acquire(0) && slot.is_drained(0) && slot.is_drained(1));
  slot.open(0);
  slot.publish(0);
  CHECK(slot.references(0) == 0);  // what was counted for none did not reach the slot
}

void surplus_releases_are_refused() {
  VersionSlot slot;
  CHECK_THROWS(slot.release(0), Misuse);
  slot.open(0);
  CHECK_THROWS(slot.release(0), Misuse);
  slot.publish(0);
  CHECK_THROWS(slot.release(0), Misuse);
  CHECK(slot.acquire() == 0);
  slot.release(0);
  CHECK_THROWS(slot.release(0), Misuse);
  CHECK(slot.references(0) == 0);
  CHECK(slot.acquire() == 0);
  slot.open(1);
  slot.publish(1);
  slot.release(0);
  CHECK_THROWS(slot.release(0), Misuse);
  CHECK(slot.references(0) == 0);
}

void order_of_life_is_kept() {
  VersionSlot slot;
  CHECK_THROWS(slot.publish(0), Misuse);
  CHECK_THROWS(slot.close(0), Misuse);
  slot.open(0);
  CHECK_THROWS(slot.open(0), Misuse);
  CHECK_THROWS(slot.reopen(0), Misuse);
  slot.publish(0);
  CHECK_THROWS(slot.publish(0), Misuse);
  CHECK_THROWS(slot.close(0), Misuse);
  CHECK(slot.acquire() == 0);
  slot.open(1);
  slot.publish(1);
  CHECK(slot.try_acquire(0));
  slot.close(0);
  CHECK(!slot.try_acquire(0));
  CHECK_THROWS(slot.close(0), Misuse);
  CHECK_THROWS(slot.open(0), Misuse);
  CHECK_THROWS(slot.publish(0), Misuse);
  CHECK(slot.references(0) == 2 && !slot.is_drained(0));
  slot.reopen(0);
  CHECK(slot.try_acquire(0));
  slot.close(0);
  for (int i = 0; i < 3; ++i) slot.release(0);
  CHECK(slot.is_drained(0));
  slot.open(0);
}

void there_are_two_slots() {
  VersionSlot slot;
  for (const int wrong : {-1, 2, 3}) {
    CHECK_THROWS(slot.try_acquire(wrong), Misuse);
    CHECK_THROWS(slot.release(wrong), Misuse);
    CHECK_THROWS(slot.publish(wrong), Misuse);
    CHECK_THROWS(slot.is_drained(wrong), Misuse);
  }
}

void counts_survive_many_publications() {
  VersionSlot slot;
  slot.open(0);
  slot.open(1);
  slot.publish(0);
  for (int turn = 0; turn < 1000; ++turn) {  // several times round the generation
    CHECK(slot.acquire() == turn % 2);
    slot.publish(1 - turn % 2);
  }
  CHECK(slot.references(0) == 500 && slot.references(1) == 500);
  slot.retract();
  slot.retract();
  for (int turn = 0; turn < 500; ++turn) {
    slot.release(0);
    slot.release(1);
  }
  slot.close(0);
  slot.close(1);
  CHECK(slot.is_drained(0) && slot.is_drained(1));
}

}  // namespace

int main() {
  nothing_is_current_at_first();
  surplus_releases_are_refused();
  order_of_life_is_kept();
  there_are_two_slots();
  counts_survive_many_publications();
}
