// Paged attention for decoding: each worker (a persistent CTA) processes its stream-K share of the KV steps (schedule.cuh) with
// an online softmax (online_softmax.cuh); combine.cuh combines the partial results of split tiles.
//
// The warps of a block interleave the steps of a tile; each has its own cp.async ring buffer in shared memory, so that no warp
// waits for another before the tile ends. With several key heads per tile, the warps of adjacent heads fill their ring buffers
// together, to load rows that are contiguous in memory, and synchronise at every step. tma_pages.cuh is faster for pages that
// TMA can load.
#pragma once

#include "paged_attention/online_softmax.cuh"

namespace ejkernel::paged_attention {

// Bytes of the ring buffers; at the end of a tile they hold each warp's unnormalised output.
template <typename S, int BLOCK>
constexpr int64_t ring_bytes(int stages) {
  const int64_t rings = int64_t(stages) * kWarps * 2 * keys_per_step(sizeof(S), BLOCK) * BLOCK * sizeof(S);
  return rings > gathered_bytes(BLOCK) ? rings : gathered_bytes(BLOCK);
}

// Shared memory of a block: ring buffers, wide queries, the warps' state.
template <typename S, int BLOCK>
constexpr int64_t shared_bytes(int stages) {
  return ring_bytes<S, BLOCK>(stages) + Queries<BLOCK>::kSharedBytes + int64_t(sizeof(WarpState));
}

// A warp's cursor over the keys of a tile up to `end`: each lane has one key of each step.
struct Cursor {
  const Problem& problem;
  const int32_t* entry;                 // of the block table
  int lowest, last, key, offset, page;  // page: -1 for a masked key

  __device__ Cursor(const Problem& problem, const Request& request, int local, int first_key, int end)
      : problem(problem), lowest(request.lowest(problem, local)), last(min(request.last(problem, local), end)), key(first_key) {
    const int before = problem.page.divide(first_key);
    offset = first_key - before * page_size(), entry = request.table(problem) + before;
    look_up();
  }

  __device__ int page_size() const { return int(problem.requests.page_size); }

  __device__ void look_up() { page = key >= lowest && key < last ? *entry : -1; }

  __device__ bool visible() const { return unsigned(page) < unsigned(problem.requests.pages); }

  __device__ int64_t byte_in(const KvArray& kv) const { return visible() ? page * kv.page + offset * kv.token : -1; }

  // Of a packed array.
  __device__ uint32_t vector_in(const VectorStrides& strides) const {
    return visible() ? uint32_t(page) * strides.page + uint32_t(offset) * strides.token : kNoRow;
  }

  __device__ void advance() {
    key += problem.step_stride, offset += problem.step_stride_rest, entry += problem.step_stride_pages;
    if (offset >= page_size()) offset -= page_size(), ++entry;
    look_up();
  }
};

template <typename T, typename S, int BLOCK, bool SWAP_AB>
struct Attention : OnlineSoftmax<Tile<T, S, BLOCK>, SWAP_AB> {
  using Base = OnlineSoftmax<Tile<T, S, BLOCK>, SWAP_AB>;
  using Layout = typename Base::Layout;
  using Base::problem, Base::results, Base::warp_state, Base::lane, Base::warp, Base::tile_key_heads, Base::tile_head,
      Base::interleave_index;
  using typename Base::Scales;

  char* rings;
  int stages;

  __device__ Attention(const Problem& problem, const Results& results, WarpState& warp_state, char* rings, int stages)
      : Base(problem, results, warp_state), rings(rings), stages(stages) {}

  __device__ char* step_at(int warp, int stage) const { return rings + (warp * stages + stage) * 2 * Layout::kBytes; }

  // Load this warp's share of the rows of warps with the same keys, into the ring buffers of the first of them and the next.
  template <int HEADS>
  __device__ void copy_share(const Cursor& cursor, const KvArray& kv, const VectorStrides& strides, const char* from, int stage,
                             int operand_offset) const {
    constexpr int kEach = sizeof(S);
    copy_rows<Layout::kKeys, kEach, BLOCK, HEADS>(step_at(warp - warp % HEADS, stage) + operand_offset,
                                                  stages * 2 * Layout::kBytes, from, cursor.vector_in(strides), strides.head,
                                                  kv.size * kEach, warp % HEADS, lane);
  }

  __device__ void copy_kv(const Cursor& cursor, const KvArray& kv, const VectorStrides& strides, const char* from, int stage,
                          int operand_offset) const {
    if (!kv.packed) {
      copy_elements<Layout::kKeys, sizeof(S), BLOCK>(step_at(warp, stage) + operand_offset, from + tile_head() * kv.head,
                                                     cursor.byte_in(kv), kv.size * int(sizeof(S)), lane);
      return;
    }
    if constexpr (Layout::kMultiHead) {
      if (tile_key_heads == 2) return copy_share<2>(cursor, kv, strides, from, stage, operand_offset);
    }
    copy_share<1>(cursor, kv, strides, from, stage, operand_offset);
  }

  // Issue the loads of the cursor's keys and values.
  __device__ void issue_step(Cursor& cursor, const char* keys, const char* values, int stage) {
    const unsigned visible_keys = __ballot_sync(kWarp, cursor.visible());
    if (lane == 0) warp_state.visible_keys[warp][stage] = int(visible_keys & Layout::kAllVisible);
    copy_kv(cursor, problem.key, problem.key_vector_strides, keys, stage, 0);
    copy_kv(cursor, problem.value, problem.value_vector_strides, values, stage, Layout::kBytes);
    cursor.advance();
  }

  // Issue the loads of the queries of this warp's key head, which are contiguous.
  __device__ void copy_queries(char* to, const Request& request, const TileCoord& tile) const {
    const char* from = this->queries_of(request, tile);
#pragma unroll 1
    for (int byte = lane * kQueryBytes; byte < tile.rows * problem.query_size * 2; byte += 32 * kQueryBytes)
      cp_async<kQueryBytes>(to + byte, from + byte, true);
    cp_async_commit_group();
  }

  // Make the lanes' loads visible to the warps that fill their ring buffers together.
  __device__ void sync_key_head_warps() const {
    if (tile_key_heads == 2) {
      warp_pair_sync(warp / 2);
    } else {
      __syncwarp();
    }
  }

  // Process steps `from` to `to` of a tile, interleaved among warps; the accumulators then hold this warp's share.
  __device__ void process_steps(const Request& request, const TileCoord& tile, int from, int to) {
    const char* keys = opaque_pointer(problem.key.data + request.batch * problem.key.batch + tile.key_head * problem.key.head);
    const char* values =
        opaque_pointer(problem.value.data + request.batch * problem.value.batch + tile.key_head * problem.value.head);
    const int first_key = (request.first_step + from + interleave_index()) * Layout::kKeys + lane % Layout::kKeys;
    Cursor cursor(problem, request, tile.local, first_key, (request.first_step + to) * Layout::kKeys);
    this->clear();
    Queries<BLOCK> queries(rings + ring_bytes<S, BLOCK>(stages), lane);
    static_assert(kRows * BLOCK * 2 <= 2 * Layout::kBytes);
    char* const rows = step_at(warp, stages - 1);  // raw queries, until the ring buffer's last stage is filled
    const Scales scales = this->read_scales(request, tile.key_head + tile_head());
    const int queries_at =
        stages > kMinStages ? 1 - stages : -stages;  // loaded after the first keys, with other keys behind them
    const int steps = (to - from + (1 << problem.interleave_bits) - 1) >> problem.interleave_bits;
    int read_stage = 0, write_stage = 0, unissued = steps;  // unissued: steps whose loads are not issued
    float factor = 0.f;
#pragma unroll 1
    for (int step = -stages; step < steps; ++step) {
      if (step == -1) {  // while all stages but the last are in flight
        factor = this->factor_of(scales.key);
        if (lane == 0) warp_state.value_scale[warp] = scales.value;
        cp_async_wait_group(-1 - queries_at);
        __syncwarp();
        this->read_queries(queries, rows, tile);
        sync_key_head_warps();  // all lanes that fill this stage have read their queries
      }
      unsigned visible_keys = 0;
      if (step >= 0) {
        cp_async_wait_group(stages - 1 - (step > 0));
        sync_key_head_warps();  // every lane has released the stage of the step before, if any
        visible_keys = unsigned(warp_state.visible_keys[warp][read_stage]);  // overlaps the next step's loads
      }
      if (step == queries_at) copy_queries(rows, request, tile);
      if (step != 0) {
        if (unissued-- > 0) issue_step(cursor, keys, values, write_stage);
        cp_async_commit_group();
        write_stage = write_stage + 1 == stages ? 0 : write_stage + 1;
      }
      if (step < 0) continue;
      const char* stage_keys = step_at(warp, read_stage);
      if (visible_keys) this->update(queries, factor, stage_keys, stage_keys + Layout::kBytes, visible_keys);
      read_stage = read_stage + 1 == stages ? 0 : read_stage + 1;
    }
    cp_async_wait_group(0);
  }

  __device__ void run(Divisor workers) {
    Request::prefetch_tables(problem);
    if (threadIdx.x == 0) results.splits[blockIdx.x].workers = 0;
    for_each_segment(problem, workers, [&](const Segment& segment) {
      if (segment.last) launch_dependents();  // the combine kernel computes its addresses meanwhile
      process_steps(segment.request, segment.tile, segment.from, segment.to);
      this->finish(segment, reinterpret_cast<float*>(rings));
      if (SWAP_AB && !segment.whole()) __syncthreads();  // before the ring buffers are refilled
    });
  }
};

// `workers` blocks of kThreads. They may start before the preceding kernel has ended, and access no memory until it has.
template <typename T, typename S, int BLOCK, bool SWAP_AB>
__global__ void __launch_bounds__(kThreads, SWAP_AB || BLOCK == 64 ? 3 : 2)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ Results results, Divisor workers, int stages) {
  EJKERNEL_DYNAMIC_SHARED(char, shared);
  wait_for_prerequisites();
  WarpState& warp_state = *reinterpret_cast<WarpState*>(shared + ring_bytes<S, BLOCK>(stages) + Queries<BLOCK>::kSharedBytes);
  Attention<T, S, BLOCK, SWAP_AB>(problem, results, warp_state, shared, stages).run(workers);
}

}  // namespace ejkernel::paged_attention
