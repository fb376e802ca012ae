// Sizes that kernels are compiled for, and what lies where in shared memory.
#pragma once

#include "hopper.cuh"

namespace ejkernel::flash_attention {

constexpr int kRows = 64;                // queries of a consumer
constexpr int kPanel = 64;               // columns of a panel
constexpr int kMostShared = 227 * 1024;  // bytes of a block
constexpr int kSlack = 1024;             // for tiles to begin on 1024 bytes

// Heads of SIZE elements, tiles of BLOCK_K keys of which STAGES are in shared memory, as many of values, and CONSUMERS
// warpgroups beside the one that copies.
template <typename Element, int SIZE, int BLOCK_K, int CONSUMERS, int STAGES>
struct Shape {
  using T = Element;
  static constexpr int kSize = SIZE, kBlockK = BLOCK_K, kConsumers = CONSUMERS, kStages = STAGES;
  static constexpr int kBlockQ = CONSUMERS * kRows, kPanels = SIZE / kPanel;
  static constexpr int kThreads = (CONSUMERS + 1) * kGroupThreads;
  static constexpr int kConsumerRegisters = CONSUMERS == 2 ? 240 : 160, kProducerRegisters = CONSUMERS == 2 ? 24 : 32;

  static constexpr int kQueryPanel = kRows * kPanelBytes, kTilePanel = BLOCK_K * kPanelBytes;
  static constexpr int kQueryBytes = kQueryPanel * kPanels, kTileBytes = kTilePanel * kPanels;
  static constexpr int kBarriers = 2 * CONSUMERS + 4 * STAGES;
  static constexpr int kWithoutOut = CONSUMERS * kQueryBytes + 2 * STAGES * kTileBytes + 8 * kBarriers + kSlack;
  // A consumer's output has a place of its own, or takes that of its queries, and the next ones wait for its way out.
  static constexpr bool kOutApart = kWithoutOut + CONSUMERS * kQueryBytes <= kMostShared;
  static constexpr int kShared = kWithoutOut + (kOutApart ? CONSUMERS * kQueryBytes : 0);

  static_assert(SIZE % kPanel == 0 && BLOCK_K % 16 == 0 && BLOCK_K <= 256 && (STAGES & (STAGES - 1)) == 0);
  static_assert(kQueryPanel % 1024 == 0 && kTilePanel % 1024 == 0 && kShared <= kMostShared);
};

#ifdef EJKERNEL_HOPPER
// A block's shared memory. `here` completes when a tile has come, `free` when all who read it are done with it.
template <class S>
struct Shared {
  unsigned char* begin;  // on 1024 bytes

  EJKERNEL_INLINE explicit Shared(unsigned char* memory) : begin(memory + (-shared_address(memory) & 1023)) {}

  EJKERNEL_INLINE unsigned char* query(int consumer) const { return begin + consumer * S::kQueryBytes; }
  EJKERNEL_INLINE unsigned char* key(int slot) const { return begin + S::kConsumers * S::kQueryBytes + slot * S::kTileBytes; }
  EJKERNEL_INLINE unsigned char* value(int slot) const { return key(S::kStages + slot); }
  EJKERNEL_INLINE unsigned char* out(int consumer) const {
    return S::kOutApart ? key(2 * S::kStages) + consumer * S::kQueryBytes : query(consumer);
  }
  EJKERNEL_INLINE Arrivals* barriers() const {
    return reinterpret_cast<Arrivals*>(key(2 * S::kStages) + (S::kOutApart ? S::kConsumers * S::kQueryBytes : 0));
  }
  EJKERNEL_INLINE Arrivals* query_here(int consumer) const { return barriers() + consumer; }
  EJKERNEL_INLINE Arrivals* query_free(int consumer) const { return barriers() + S::kConsumers + consumer; }
  EJKERNEL_INLINE Arrivals* key_here(int slot) const { return barriers() + 2 * S::kConsumers + slot; }
  EJKERNEL_INLINE Arrivals* key_free(int slot) const { return key_here(S::kStages + slot); }
  EJKERNEL_INLINE Arrivals* value_here(int slot) const { return key_here(2 * S::kStages + slot); }
  EJKERNEL_INLINE Arrivals* value_free(int slot) const { return key_here(3 * S::kStages + slot); }

  // By all threads of the block.
  EJKERNEL_INLINE void open() const {
    constexpr int kWarps = S::kConsumers * kGroupThreads / 32;
    if (threadIdx.x == 0) {
      for (int i = 0; i < S::kConsumers; ++i) {
        open_barrier(query_here(i), 1);
        open_barrier(query_free(i), S::kOutApart ? kGroupThreads / 32 : 1);
      }
      for (int i = 0; i < S::kStages; ++i) {
        open_barrier(key_here(i), 1);
        open_barrier(key_free(i), kWarps);
        open_barrier(value_here(i), 1);
        open_barrier(value_free(i), kWarps);
      }
      publish_barriers();
    }
    __syncthreads();
  }
};

// Where the tile lies that is the `count`-th of the kernel, and the parity of the phase in which it comes.
template <class S>
EJKERNEL_INLINE int slot_of(int count) {
  return count & (S::kStages - 1);
}
template <class S>
EJKERNEL_INLINE unsigned parity_of(int count) {
  return unsigned(count / S::kStages) & 1;
}
#endif

}  // namespace ejkernel::flash_attention
