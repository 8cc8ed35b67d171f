"""The operator ai.qrnn::FoPool: its name and version, and its body in standard ONNX operators.

A file holds both the node and the body. ONNX Runtime with our library registered runs the kernel;
any other runtime expands the body. The body is the slow path: one Scan iteration a timestep, so the
size of the file does not depend on T, but its speed does.
"""

from __future__ import annotations

import onnx
from onnx import parser

DOMAIN = "ai.qrnn"
DOMAIN_VERSION = 1
POOL_OP = "FoPool"

OPSET_VERSION = 18
"""Oldest opset with reductions whose axes are inputs; every ONNX Runtime from 1.14 on reads it."""

IR_VERSION = 8
"""Oldest file format with local functions (onnx 1.10)."""

# The maths is that of qrnn_serve.kernels.reference.fo_pool, batch-major. Padded timesteps keep the
# state (keep 1, new 0) and are chosen by Where, because a padded value may be NaN or infinite. The
# reference evaluator of onnx scans only forward over the first axis, so order and axis are changed
# around the Scan. ONNX Runtime refuses to scan nothing, so a batch without timesteps skips it.
_BODY = """
<domain: "ai.qrnn", opset_import: ["" : %d]>
FoPool <output_gate, reverse, zoneout> %s
{%s
  gated = Constant <value_int: int = @output_gate> ()
  backward = Constant <value_int: int = @reverse> ()
  zoned = Constant <value_float: float = @zoneout> ()
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  two = Constant <value_int = 2> ()
  first = Constant <value_ints = [0]> ()
  time_axis = Constant <value_ints = [1]> ()
  channel_axis = Constant <value_ints = [2]> ()
  zero_float = Constant <value_float = 0.0> ()
  one_float = Constant <value_float = 1.0> ()
  nothing = CastLike (zero_float, gates)
  unit = CastLike (one_float, gates)
  zoneout_share = CastLike (zoned, gates)
  gated_share = CastLike (gated, gates)

  H = Shape <start = 1, end = 2> (c0)
  H_twice = Add (H, H)
  O_start = Mul (H_twice, gated)
  O_stop = Add (O_start, H)
  Z = Slice (gates, first, H, channel_axis)
  F = Slice (gates, H, H_twice, channel_axis)
  O = Slice (gates, O_start, O_stop, channel_axis)

  z = Tanh (Z)
  f_whole = Sigmoid (F)
  stays = Sub (unit, zoneout_share)
  f = Mul (f_whole, stays)
  new = Mul (f, z)
  keep = Sub (unit, f)
  o_gate = Sigmoid (O)
  o_gated = Mul (o_gate, gated_share)
  ungated_share = Sub (unit, gated_share)
  o = Add (o_gated, ungated_share)

  T_vector = Shape <start = 1, end = 2> (gates)
  T = Squeeze (T_vector, first)
  timesteps = Range (zero, T, one)
  lengths_column = Unsqueeze (lengths, time_axis)
  real_timesteps = Less (timesteps, lengths_column)
  real = Unsqueeze (real_timesteps, channel_axis)
  new_real = Where (real, new, nothing)
  keep_real = Where (real, keep, unit)

  last = Sub (T, one)
  timesteps_twice = Mul (timesteps, two)
  mirror = Sub (last, timesteps_twice)
  shift = Mul (mirror, backward)
  order = Add (timesteps, shift)
  new_time_major = Transpose <perm = [1, 0, 2]> (new_real)
  keep_time_major = Transpose <perm = [1, 0, 2]> (keep_real)
  new_ordered = Gather <axis = 0> (new_time_major, order)
  keep_ordered = Gather <axis = 0> (keep_time_major, order)

  no_timestep = Equal (T, zero)
  c, cells_ordered = If (no_timestep) <
    then_branch = nothing_to_scan () => (c_same, cells_none) {
      c_same = Identity (c0)
      cells_none = Identity (new_ordered)
    },
    else_branch = scan_timesteps () => (c_last, cells_all) {
      c_last, cells_all = Scan <
        num_scan_inputs = 2,
        body = timestep (c_before, keep_t, new_t) => (c_after, cell_t) {
          kept = Mul (keep_t, c_before)
          c_after = Add (kept, new_t)
          cell_t = Identity (c_after)
        }
      > (c0, keep_ordered, new_ordered)
    }
  >
  cells_time_major = Gather <axis = 0> (cells_ordered, order)
  cells = Transpose <perm = [1, 0, 2]> (cells_time_major)
  h_gated = Mul (o, cells)
  h = Where (real, h_gated, nothing)%s
}
"""
_PLAIN = ("(gates, lengths, c0) => (h, c)", "", "")
# As the kernels do, half precision is computed in float32 and rounded once.
_HALF = (
    "(gates_half, lengths, c0_half) => (h_half, c_half)",
    """
  gates = Cast <to = 1> (gates_half)
  c0 = Cast <to = 1> (c0_half)""",
    """
  h_half = CastLike (h, gates_half)
  c_half = CastLike (c, gates_half)""",
)


def pool_function(*, half: bool = False) -> onnx.FunctionProto:
    """The local function ai.qrnn::FoPool, for tensors in half precision if `half`.

    Inputs: gates [B, T, G*H], pre-activations in the order Z, F(, O); lengths [B] int64, each from
    0 to T; c0 [B, H]. Outputs: h [B, T, H], exactly 0 at padded timesteps; c [B, H], the cell value
    after each row's last timestep in running order. Attributes: output_gate (G is 3, else 2),
    reverse, zoneout; all must be given.
    """
    return parser.parse_function(_BODY % (OPSET_VERSION, *(_HALF if half else _PLAIN)))
