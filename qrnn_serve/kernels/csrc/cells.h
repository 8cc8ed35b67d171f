// The cell states of one task of fo_pool between two timesteps.
//
// float64 arithmetic in every timestep would cost as much as a third of the activations. The state
// is float64 (see state_math.h) only every kChunk timesteps; between them it is, in float32,
//
//   c_t = (1 - gone_t) * start + fresh_t
//
// with start the state before the chunk, gone the share of it that was forgotten since and fresh
// what came in its place. With long memory gone and fresh stay small, so their digits are not lost
// against those of the state. f = 0 keeps the state exactly and f = 1 resets it exactly.
//
// Chunks are counted from a sequence's first timestep, so that a sequence has the same bits in
// every batch and for any number of threads.
#pragma once

#include "walk.h"

namespace {

constexpr int64_t kChunk = 8;

template <class D, class Vector = typename D::Vector>
class Cells;

template <class D>
class Cells<D, VFloat> {
  public:
    void read_from(const States<typename D::Storage>& c0, int64_t b, int64_t at, int64_t width) {
        read_state<D>(c0, b, state_ + at, width);
        for (int64_t i = at; i < at + width; i += kLanes) {
            save(gone_ + i, VFloat{});
            save(fresh_ + i, VFloat{});
        }
    }

    // To be called before each timestep; `position` is its number.
    void begin_timestep(int64_t position, int64_t at, int64_t width) {
        if (position % kChunk == 0) fold(at, width);
    }

    // Moves the vector of channels at `at` one timestep on.
    QRNN_INLINE VFloat advance(int64_t at, const VFloat& f, const VFloat& x) {
        const VFloat before = get(gone_ + at);
        const VFloat gone = f * (1.0f - before) + before;
        const VFloat fresh = f * x + (1.0f - f) * get(fresh_ + at);
        save(gone_ + at, gone);
        save(fresh_ + at, fresh);
        return (1.0f - gone) * get(start_ + at) + fresh;
    }

    void write_to(const States<typename D::Storage>& c, int64_t b, int64_t at, int64_t width) {
        fold(at, width);
        for (int64_t i = 0; i < width; i += kLanes)
            store<D>(c.at(b) + i, get(start_ + at + i) + get(fresh_ + at + i), width - i);
    }

  private:
    static VFloat get(const float* from) { return Float32::load(from); }

    static void save(float* to, const VFloat& v) { store<Float32>(to, v); }

    void fold(int64_t at, int64_t width) {
        for (int64_t i = at; i < at + width; i += kLanes) {
            const Halves gone = split(get(gone_ + i)), fresh = split(get(fresh_ + i));
            const VDouble low = kept(state_ + i, gone.low) + widen(fresh.low);
            const VDouble high = kept(state_ + i + kHalfLanes, gone.high) + widen(fresh.high);
            const VFloat now = join(narrow(low), narrow(high));
            // What is infinite or NaN counts as fresh: gone may round to 1 although no f was 1, and
            // 0 * infinity would turn an infinity into NaN too early.
            const VInt finite = now - now == VFloat{};
            write(state_ + i, finite_or_zero(low));
            write(state_ + i + kHalfLanes, finite_or_zero(high));
            save(start_ + i, select(finite, now, VFloat{}));
            save(fresh_ + i, select(finite, VFloat{}, now));
            save(gone_ + i, VFloat{});
        }
    }

    static VDouble kept(const double* state, const VHalfFloat& gone) {
        return (1.0 - widen(gone)) * read(state);
    }

    alignas(64) double state_[qrnn::kStateElements];
    alignas(64) float start_[qrnn::kStateElements];
    alignas(64) float gone_[qrnn::kStateElements];
    alignas(64) float fresh_[qrnn::kStateElements];
};

template <class D>
class Cells<D, VDouble> {
  public:
    void read_from(const States<double>& c0, int64_t b, int64_t at, int64_t width) {
        read_state<D>(c0, b, state_ + at, width);
    }

    void begin_timestep(int64_t, int64_t, int64_t) {}

    VDouble advance(int64_t at, const VDouble& f, const VDouble& x) {
        return ::advance(state_ + at, f, x);
    }

    void write_to(const States<double>& c, int64_t b, int64_t at, int64_t width) const {
        write_state<D>(c, b, state_ + at, width);
    }

  private:
    alignas(64) double state_[qrnn::kStateElements];
};

}  // namespace
