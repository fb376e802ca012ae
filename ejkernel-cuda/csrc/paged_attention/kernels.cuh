// Attention of packed queries over a paged cache: each worker walks over its share of the keys (schedule.cuh) with a running
// maximum and sum (sums.cuh), and merge.cuh puts tiles together whose keys are shared.
//
// The warps of a block take turns at the keys of a tile, each with a ring of its own in shared memory, so that none waits for
// another before the tile is done. Where a tile has several key heads, warps take turns at those first, and fill their rings
// together: what lies side by side in memory is read at once, for which they wait for each other at every step. Of pages whose
// rows the tensor memory accelerator can copy boxes.cuh does better.
#pragma once

#include "paged_attention/sums.cuh"

namespace ejkernel::paged_attention {

// Bytes of the rings; when a tile is done they hold its weighted values of each warp.
template <typename S, int BLOCK>
constexpr int64_t ring_bytes(int stages) {
  const int64_t rings = int64_t(stages) * kWarps * 2 * keys_of_step(sizeof(S), BLOCK) * BLOCK * sizeof(S);
  return rings > gathered_bytes(BLOCK) ? rings : gathered_bytes(BLOCK);
}

// Bytes of shared memory of a block: rings, wide queries, notes.
template <typename S, int BLOCK>
constexpr int64_t shared_bytes(int stages) {
  return ring_bytes<S, BLOCK>(stages) + Queries<BLOCK>::kSharedBytes + int64_t(sizeof(Notes));
}

// A warp's way through the keys of a tile up to `end`: each lane looks after one key of each step.
struct Cursor {
  const Problem& problem;
  const int32_t* entry;                 // of the block table
  int lowest, last, key, offset, page;  // page: -1 where the key is not visible

  __device__ Cursor(const Problem& problem, const Request& request, int local, int first_key, int end)
      : problem(problem), lowest(request.lowest(problem, local)), last(min(request.last(problem, local), end)), key(first_key) {
    const int before = problem.page.divide(first_key);
    offset = first_key - before * page_size(), entry = request.table(problem) + before;
    look_up();
  }

  __device__ int page_size() const { return int(problem.requests.page_size); }

  __device__ void look_up() { page = key >= lowest && key < last ? *entry : -1; }

  __device__ bool visible() const { return unsigned(page) < unsigned(problem.requests.pages); }

  __device__ int64_t byte_in(const Side& side) const { return visible() ? page * side.page + offset * side.token : -1; }

  // Of a packed side.
  __device__ uint32_t access_in(const Accesses& apart) const {
    return visible() ? uint32_t(page) * apart.page + uint32_t(offset) * apart.token : kNowhere;
  }

  __device__ void advance() {
    key += problem.turn, offset += problem.turn_rest, entry += problem.turn_pages;
    if (offset >= page_size()) offset -= page_size(), ++entry;
    look_up();
  }
};

template <typename T, typename S, int BLOCK, bool TURNED>
struct Attention : Sums<Tile<T, S, BLOCK>, TURNED> {
  using Base = Sums<Tile<T, S, BLOCK>, TURNED>;
  using Layout = typename Base::Layout;
  using Base::problem, Base::results, Base::notes, Base::lane, Base::warp, Base::together, Base::my_head, Base::my_turn;
  using typename Base::Scales;

  char* rings;
  int stages;

  __device__ Attention(const Problem& problem, const Results& results, Notes& notes, char* rings, int stages)
      : Base(problem, results, notes), rings(rings), stages(stages) {}

  __device__ char* step_at(int warp, int slot) const { return rings + (warp * stages + slot) * 2 * Layout::kBytes; }

  // This warp's part of what warps with the same keys copy: to the ring of the first of them on.
  template <int HEADS>
  __device__ void copy_part(const Cursor& cursor, const Side& side, const Accesses& apart, const char* from, int slot,
                            int beside) const {
    constexpr int kEach = sizeof(S);
    copy_rows<Layout::kKeys, kEach, BLOCK, HEADS>(step_at(warp - warp % HEADS, slot) + beside, stages * 2 * Layout::kBytes,
                                                  from, cursor.access_in(apart), apart.head, side.size * kEach, warp % HEADS,
                                                  lane);
  }

  __device__ void copy_side(const Cursor& cursor, const Side& side, const Accesses& apart, const char* from, int slot,
                            int beside) const {
    if (!side.packed) {
      copy_elements<Layout::kKeys, sizeof(S), BLOCK>(step_at(warp, slot) + beside, from + my_head() * side.head,
                                                     cursor.byte_in(side), side.size * int(sizeof(S)), lane);
      return;
    }
    if constexpr (Layout::kShares) {
      if (together == 2) return copy_part<2>(cursor, side, apart, from, slot, beside);
    }
    copy_part<1>(cursor, side, apart, from, slot, beside);
  }

  // Begin to copy the cursor's keys and values.
  __device__ void begin_step(Cursor& cursor, const char* keys, const char* values, int slot) {
    const unsigned seen = __ballot_sync(kWarp, cursor.visible());
    if (lane == 0) notes.seen[warp][slot] = int(seen & Layout::kAllSeen);
    copy_side(cursor, problem.key, problem.keys_apart, keys, slot, 0);
    copy_side(cursor, problem.value, problem.values_apart, values, slot, Layout::kBytes);
    cursor.advance();
  }

  // Begin to copy the rows of queries of this warp's key head, which lie one after the other.
  __device__ void copy_queries(char* to, const Request& request, const TileOf& tile) const {
    const char* from = this->queries_of(request, tile);
#pragma unroll 1
    for (int byte = lane * kQueryBytes; byte < tile.rows * problem.query_size * 2; byte += 32 * kQueryBytes)
      copy_bytes_ahead<kQueryBytes>(to + byte, from + byte, true);
    commit_copies();
  }

  // What lanes have copied is there for those that read it: the warps that fill their rings together.
  __device__ void meet() const {
    if (together == 2) {
      meet_beside(warp / 2);
    } else {
      __syncwarp();
    }
  }

  // Steps `from` to `to` of a tile, at which warps take turns; rows hold this warp's share of them afterwards.
  __device__ void walk(const Request& request, const TileOf& tile, int from, int to) {
    const char* keys = held(problem.key.data + request.batch * problem.key.batch + tile.key_head * problem.key.head);
    const char* values = held(problem.value.data + request.batch * problem.value.batch + tile.key_head * problem.value.head);
    const int first_key = (request.first_step + from + my_turn()) * Layout::kKeys + lane % Layout::kKeys;
    Cursor cursor(problem, request, tile.local, first_key, (request.first_step + to) * Layout::kKeys);
    this->clear();
    Queries<BLOCK> queries(rings + ring_bytes<S, BLOCK>(stages), lane);
    static_assert(kRows * BLOCK * 2 <= 2 * Layout::kBytes);
    char* const rows = step_at(warp, stages - 1);  // as they are stored, until the ring is filled to its end
    const Scales scales = this->read_scales(request, tile.key_head + my_head());
    const int queries_at = stages > kLeastStages ? 1 - stages : -stages;  // behind the first keys, where others follow
    const int steps = (to - from + (1 << problem.turns_bits) - 1) >> problem.turns_bits;
    int slot = 0, free = 0, rest = steps;  // rest: steps that have not begun
    float factor = 0.f;
#pragma unroll 1
    for (int step = -stages; step < steps; ++step) {
      if (step == -1) {  // while all but the last keys of the ring are on their way
        factor = this->factor_of(scales.key);
        if (lane == 0) notes.value_scale[warp] = scales.value;
        wait_for_copies(-1 - queries_at);
        __syncwarp();
        this->read_queries(queries, rows, tile);
        meet();  // and all lanes that fill this end of the ring have read theirs
      }
      unsigned seen = 0;
      if (step >= 0) {
        wait_for_copies(stages - 1 - (step > 0));
        meet();                                   // and every lane is done with the slot of the step before, if there was one
        seen = unsigned(notes.seen[warp][slot]);  // on its way while the next step begins
      }
      if (step == queries_at) copy_queries(rows, request, tile);
      if (step != 0) {
        if (rest-- > 0) begin_step(cursor, keys, values, free);
        commit_copies();
        free = free + 1 == stages ? 0 : free + 1;
      }
      if (step < 0) continue;
      const char* held_keys = step_at(warp, slot);
      if (seen) this->take(queries, factor, held_keys, held_keys + Layout::kBytes, seen);
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
    wait_for_copies(0);
  }

  __device__ void run(Divisor workers) {
    Request::fetch_tables_ahead(problem);
    if (threadIdx.x == 0) results.splits[blockIdx.x].workers = 0;
    each_piece(problem, workers, [&](const Piece& piece) {
      if (piece.last) start_next_kernel();  // it finds out meanwhile what it is to put together
      walk(piece.request, piece.tile, piece.from, piece.to);
      this->finish(piece, reinterpret_cast<float*>(rings));
      if (TURNED && !piece.whole()) __syncthreads();  // before the rings are filled anew
    });
  }
};

// `workers` blocks of kThreads. They may begin before the kernel ahead of them has ended, and touch nothing until it has.
template <typename T, typename S, int BLOCK, bool TURNED>
__global__ void __launch_bounds__(kThreads, TURNED || BLOCK == 64 ? 3 : 2)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ Results results, Divisor workers, int stages) {
  EJKERNEL_SHARED_REST(char, shared);
  wait_for_last_kernel();
  Notes& notes = *reinterpret_cast<Notes*>(shared + ring_bytes<S, BLOCK>(stages) + Queries<BLOCK>::kSharedBytes);
  Attention<T, S, BLOCK, TURNED>(problem, results, notes, shared, stages).run(workers);
}

}  // namespace ejkernel::paged_attention
