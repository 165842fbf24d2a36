"""Copies of many arrays on a device, in one launch: by a kernel of the driver's language, which takes no compiler."""

from __future__ import annotations

from types import SimpleNamespace

from thalweg.kernels.triton.xla import Launched

#: Threads of a block, and blocks that take turns with each copy.
THREADS, TURNS = 256, 32
#: By bytes that a thread copies at once: their type, and their registers.
WIDTHS = {16: ("v4.b32", "{%r7, %r8, %r9, %r10}"), 4: ("b32", "%r7"), 1: ("b8", "%r7")}
#: table: of each copy its source, its target, how many bytes are read, and how many are written, the rest as 0.
BEGIN = """.version 7.0
.target sm_80
.address_size 64
.visible .entry move(.param .u64 table)
{
  .reg .pred %p<3>;
  .reg .b32 %r<11>;
  .reg .b64 %rd<11>;
  ld.param.u64 %rd0, [table];
  mov.u32 %r0, %ctaid.x;
  mul.wide.u32 %rd1, %r0, 32;
  add.s64 %rd0, %rd0, %rd1;
  ld.global.v2.u64 {%rd1, %rd2}, [%rd0];
  ld.global.v2.u64 {%rd3, %rd4}, [%rd0+16];
  mov.u32 %r1, %ctaid.y;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %nctaid.y;
  mad.lo.u32 %r5, %r1, %r2, %r3;
  mul.lo.u32 %r6, %r4, %r2;
  or.b64 %rd5, %rd1, %rd2;
  or.b64 %rd5, %rd5, %rd3;
  or.b64 %rd5, %rd5, %rd4;
"""
#: If all four are multiples of a width.
LOOP = """  and.b64 %rd6, %rd5, {mask};
  setp.ne.u64 %p0, %rd6, 0;
  @%p0 bra after{width};
  mul.wide.u32 %rd7, %r5, {width};
  mul.wide.u32 %rd8, %r6, {width};
next{width}:
  setp.ge.u64 %p1, %rd7, %rd4;
  @%p1 bra done;
  mov.b32 %r7, 0;
  mov.b32 %r8, 0;
  mov.b32 %r9, 0;
  mov.b32 %r10, 0;
  add.s64 %rd9, %rd1, %rd7;
  add.s64 %rd10, %rd2, %rd7;
  setp.lt.u64 %p2, %rd7, %rd3;
  @%p2 ld.global.{type} {registers}, [%rd9];
  st.global.{type} [%rd10], {registers};
  add.s64 %rd7, %rd7, %rd8;
  bra next{width};
after{width}:
"""
LOOPS = [LOOP.format(mask=width - 1, width=width, type=type_, registers=own) for width, (type_, own) in WIDTHS.items()]
SOURCE = "".join([BEGIN, *LOOPS, "done:\n  ret;\n}\n"])
KERNEL = SimpleNamespace(asm={"cubin": SOURCE.encode() + b"\0"}, metadata=SimpleNamespace(name="move", shared=0))


def launch_moves(count: int, table: int) -> Launched:
    """table: the buffer with the table of so many copies."""
    return Launched(KERNEL, THREADS, (count, TURNS, 1), [(table, 0)])
