/* The C interface of the CPU pool kernels: plain C, no torch and no ONNX Runtime headers.
 *
 * The maths stands in qrnn_serve/kernels/reference.py. Letters: T timesteps, B sequences,
 * H channels, G gates (3 with an output gate, else 2), N timesteps of all sequences laid end to
 * end.
 *
 * Every field is eight bytes wide, so that a caller in any language can pack an argument block
 * without knowing padding rules. All functions are thread-safe and reentrant, allocate nothing that
 * outlives the call, and never throw.
 */
#ifndef QRNN_KERNELS_H
#define QRNN_KERNELS_H

#include <stdint.h>

#if defined(__GNUC__)
#define QRNN_API __attribute__((visibility("default")))
#else
#define QRNN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct or a meaning changes; qrnn_abi_version() must equal it. */
#define QRNN_ABI_VERSION 1

enum qrnn_dtype {
    QRNN_FLOAT32 = 0,
    QRNN_FLOAT16 = 1,  /* computed in float32 */
    QRNN_BFLOAT16 = 2, /* computed in float32 */
    QRNN_FLOAT64 = 3
};

enum qrnn_status {
    QRNN_OK = 0,
    QRNN_BAD_ARGUMENT = 1, /* unknown dtype, negative size, missing pointer, zoneout outside 0..1 */
    QRNN_BAD_OFFSETS = 2,  /* offsets do not start at 0, go down, or do not end at N */
    QRNN_BAD_LENGTHS = 3,  /* a length is below 0 or above T */
    QRNN_OUT_OF_MEMORY = 4,
    QRNN_CUDA_FAILED = 5 /* no driver, no compiler, or one of them refused; `message` says why */
};

/* Rows of channels. Row (t, b) starts at element t * time_stride + b * sequence_stride; with
 * offsets, row n starts at n * time_stride. A state [B, H] uses sequence_stride only. Channels are
 * contiguous. */
typedef struct qrnn_rows {
    void* data;
    int64_t time_stride;
    int64_t sequence_stride;
} qrnn_rows;

/* Which rows form the sequences. */
typedef struct qrnn_sequences {
    int64_t dtype;          /* enum qrnn_dtype, of every tensor of the call */
    int64_t timesteps;      /* T; with offsets: N */
    int64_t batch;          /* B */
    int64_t hidden;         /* H */
    int64_t reverse;        /* nonzero: run each sequence from its last timestep to its first */
    const int64_t* offsets; /* [B + 1] from 0 to N for packed rows, or null */
    const int64_t* lengths; /* [B] for padded rows, or null; excludes offsets. Timesteps from a
                             * length on do not move the state; their outputs and gradients are 0 */
} qrnn_sequences;

typedef void (*qrnn_task)(void* data, int64_t index);

/* Calls task(data, i) once for every i below count, in any order and on any threads, and returns
 * when all have returned. */
typedef void (*qrnn_parallel_for)(void* context, qrnn_task task, int64_t count, void* data);

/* Who runs the work. */
typedef struct qrnn_parallel {
    int64_t threads;       /* at most this many at once; 1 stays on the caller's thread */
    qrnn_parallel_for run; /* null: the library's own thread pool */
    void* context;         /* handed to run */
} qrnn_parallel;

/* h_t = f_t * x_t + (1 - f_t) * h_{t-1} */
typedef struct qrnn_forget_mult_args {
    qrnn_sequences sequences;
    qrnn_parallel parallel;
    qrnn_rows f;
    qrnn_rows x;
    qrnn_rows h0; /* [B, H]; null data is zeros */
    qrnn_rows h;  /* out */
} qrnn_forget_mult_args;

typedef struct qrnn_forget_mult_backward_args {
    qrnn_sequences sequences;
    qrnn_parallel parallel;
    qrnn_rows grad_h;
    qrnn_rows f;
    qrnn_rows x;
    qrnn_rows h;       /* what the forward call gave */
    qrnn_rows h0;      /* [B, H]; null data is zeros */
    qrnn_rows grad_f;  /* out */
    qrnn_rows grad_x;  /* out */
    qrnn_rows grad_h0; /* out, [B, H] */
} qrnn_forget_mult_backward_args;

/* z = tanh(Z); f = sigmoid(F) * (1 - zoneout); c_t = f * z + (1 - f) * c_{t-1};
 * h = sigmoid(O) * c, or c without an output gate. */
typedef struct qrnn_fo_pool_args {
    qrnn_sequences sequences;
    qrnn_parallel parallel;
    int64_t output_gate; /* nonzero: gate rows are Z, F, O; zero: Z, F */
    double zoneout;      /* 0 to 1 */
    qrnn_rows gates;     /* G * H channels a row */
    qrnn_rows c0;        /* [B, H]; null data is zeros */
    qrnn_rows h;         /* out */
    qrnn_rows c;         /* out, [B, H]: the state after the last timestep in running order */
} qrnn_fo_pool_args;

typedef struct qrnn_fo_pool_backward_args {
    qrnn_sequences sequences;
    qrnn_parallel parallel;
    int64_t output_gate;
    double zoneout;
    qrnn_rows grad_h; /* null data is zeros */
    qrnn_rows grad_c; /* [B, H]; null data is zeros */
    qrnn_rows gates;
    qrnn_rows c0;         /* [B, H]; null data is zeros */
    qrnn_rows grad_gates; /* out */
    qrnn_rows grad_c0;    /* out, [B, H] */
} qrnn_fo_pool_backward_args;

/* qrnn_fo_pool on a GPU, for hosts without Python. Every tensor is in the memory of that GPU. */
typedef struct qrnn_cuda_fo_pool_args {
    qrnn_sequences sequences; /* offsets and lengths cannot be checked: where they are wrong the
                               * results are NaN, and nothing outside the tensors is touched */
    int64_t output_gate;
    double zoneout;
    qrnn_rows gates;
    qrnn_rows c0; /* null data is zeros */
    qrnn_rows h;  /* out */
    qrnn_rows c;  /* out */
    void* stream;          /* CUstream on which the work is queued; null is the default stream */
    char* message;         /* out: what went wrong, or null */
    int64_t message_bytes; /* room there */
} qrnn_cuda_fo_pool_args;

/* Queues the work and returns; the first call on a device for a dtype compiles kernels. */
QRNN_API int32_t qrnn_cuda_fo_pool(const qrnn_cuda_fo_pool_args* args);

/* Each returns an enum qrnn_status. Nothing is written unless it is QRNN_OK. */
QRNN_API int32_t qrnn_forget_mult(const qrnn_forget_mult_args* args);
QRNN_API int32_t qrnn_forget_mult_backward(const qrnn_forget_mult_backward_args* args);
QRNN_API int32_t qrnn_fo_pool(const qrnn_fo_pool_args* args);
QRNN_API int32_t qrnn_fo_pool_backward(const qrnn_fo_pool_backward_args* args);

QRNN_API int32_t qrnn_abi_version(void);

/* The instruction set in use: "avx512", "avx2" or "portable". */
QRNN_API const char* qrnn_instruction_set(void);

/* Use another instruction set from now on, for tests and measurements. QRNN_BAD_ARGUMENT: this
 * build or this processor does not have it. */
QRNN_API int32_t qrnn_select_instruction_set(const char* name);

#ifdef __cplusplus
}
#endif

#endif /* QRNN_KERNELS_H */
