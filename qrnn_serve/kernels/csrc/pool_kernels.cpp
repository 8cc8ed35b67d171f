// The kernels of one instruction set. Compiled once per set, with QRNN_VECTOR_BYTES, QRNN_TABLE and
// QRNN_TABLE_NAME given on the command line.

#include "backward.h"

namespace {

template <class Kernel>
void run(const qrnn_sequences& sequences, const qrnn::Block& block, bool time_outer, bool backward,
         Kernel kernel) {
    const Walk walk(sequences, block, backward);
    if (time_outer)
        walk.time_outer(kernel);
    else
        walk.sequence_outer(kernel);
}

template <class D>
void forget_mult_of(const qrnn_forget_mult_args& a, const qrnn::Block& block) {
    run(a.sequences, block, qrnn::time_is_outer(a.sequences, a.f), false, ForgetMult<D>(a, block));
}

template <class D>
void forget_mult_backward_of(const qrnn_forget_mult_backward_args& a, const qrnn::Block& block) {
    run(a.sequences, block, qrnn::time_is_outer(a.sequences, a.f), true,
        ForgetMultBackward<D>(a, block));
}

template <class D>
void fo_pool_of(const qrnn_fo_pool_args& a, const qrnn::Block& block) {
    const bool time_outer = qrnn::time_is_outer(a.sequences, a.gates);
    if (a.output_gate)
        run(a.sequences, block, time_outer, false, FoPool<D, true>(a, block));
    else
        run(a.sequences, block, time_outer, false, FoPool<D, false>(a, block));
}

template <class D, bool output_gate>
void fo_pool_backward_with(const qrnn_fo_pool_backward_args& a, const qrnn::Block& block,
                           void* scratch) {
    CellRecorder<D> recorder(a, block, scratch);
    FoPoolBackward<D, output_gate> kernel(a, block, recorder);
    const Walk forward(a.sequences, block, false);
    const Walk backward(a.sequences, block, true);
    for (int64_t b = block.first_sequence; b < block.last_sequence; ++b) {
        forward.one_sequence(recorder, b);
        backward.one_sequence(kernel, b);
    }
}

template <class D>
void fo_pool_backward_of(const qrnn_fo_pool_backward_args& a, const qrnn::Block& block,
                         void* scratch) {
    if (a.output_gate)
        fo_pool_backward_with<D, true>(a, block, scratch);
    else
        fo_pool_backward_with<D, false>(a, block, scratch);
}

void forget_mult(const qrnn_forget_mult_args& a, const qrnn::Block& block) {
    switch (a.sequences.dtype) {
        case QRNN_FLOAT32: return forget_mult_of<Float32>(a, block);
        case QRNN_FLOAT16: return forget_mult_of<Float16>(a, block);
        case QRNN_BFLOAT16: return forget_mult_of<Bfloat16>(a, block);
        case QRNN_FLOAT64: return forget_mult_of<Float64>(a, block);
    }
}

void forget_mult_backward(const qrnn_forget_mult_backward_args& a, const qrnn::Block& block) {
    switch (a.sequences.dtype) {
        case QRNN_FLOAT32: return forget_mult_backward_of<Float32>(a, block);
        case QRNN_FLOAT16: return forget_mult_backward_of<Float16>(a, block);
        case QRNN_BFLOAT16: return forget_mult_backward_of<Bfloat16>(a, block);
        case QRNN_FLOAT64: return forget_mult_backward_of<Float64>(a, block);
    }
}

void fo_pool(const qrnn_fo_pool_args& a, const qrnn::Block& block) {
    switch (a.sequences.dtype) {
        case QRNN_FLOAT32: return fo_pool_of<Float32>(a, block);
        case QRNN_FLOAT16: return fo_pool_of<Float16>(a, block);
        case QRNN_BFLOAT16: return fo_pool_of<Bfloat16>(a, block);
        case QRNN_FLOAT64: return fo_pool_of<Float64>(a, block);
    }
}

void fo_pool_backward(const qrnn_fo_pool_backward_args& a, const qrnn::Block& block,
                      void* scratch) {
    switch (a.sequences.dtype) {
        case QRNN_FLOAT32: return fo_pool_backward_of<Float32>(a, block, scratch);
        case QRNN_FLOAT16: return fo_pool_backward_of<Float16>(a, block, scratch);
        case QRNN_BFLOAT16: return fo_pool_backward_of<Bfloat16>(a, block, scratch);
        case QRNN_FLOAT64: return fo_pool_backward_of<Float64>(a, block, scratch);
    }
}

}  // namespace

namespace qrnn {

const KernelTable QRNN_TABLE = {QRNN_TABLE_NAME, forget_mult, forget_mult_backward, fo_pool,
                                fo_pool_backward};

}  // namespace qrnn
