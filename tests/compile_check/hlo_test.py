"""Reading compiled programs: a text written by hand, with everything that has misled a reader."""

import pytest

from ttt_jax.compile_check import hlo

# A loop of 24 rounds around a loop of 3 (u32), an asynchronous gather, a channel that appears
# twice, a kernel whose attributes go over several lines, and tuples with comments in their types.
_TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "a.py"

%fused (p: bf16[2,4]) -> bf16[8,4] {
  %p = bf16[2,4]{1,0} parameter(0)
  ROOT %all-gather.9 = bf16[8,4]{1,0:T(8,128)S(1)} all-gather(%p), channel_id=7, dimensions={0}, metadata={op_name="jit(step)/while/body/mlp/dot_general"}
}

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

%inner_condition (s: (u32[])) -> pred[] {
  %bound = u32[]{:T(128)} constant(3)
  ROOT %less = pred[] compare(%index, %bound), direction=LT
}

%inner_body (s: (u32[])) -> (u32[]) {
  %collective-permute-start.1 = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1}}
  %collective-permute-done.1 = f32[4]{0} collective-permute-done(%collective-permute-start.1)
  ROOT %t = (u32[]) tuple(%i)
}

%outer_condition (s: (s32[], f32[2])) -> pred[] {
  %limit = s32[]{:T(128)} constant(24)
  ROOT %less.1 = pred[] compare(%index.1, %limit), direction=LT
}

%outer_body (s: (s32[], f32[2])) -> (s32[], f32[2]) {
  %fusion.1 = bf16[8,4]{1,0} fusion(%y), kind=kLoop, calls=%fused
  %la_fwd.2 = (f32[2,4]{1,0}, /*index=5*/f32[]) custom-call(%q), custom_call_target="tpu_custom_call", backend_config={"custom_call_config": {"body": "x",
"cost_estimate":{"flops":"12"},
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"327680"}]
 }}, metadata={op_name="jit(step)/la_fwd/pallas_call"}
  %while.2 = (u32[]) while(%z), condition=%inner_condition, body=%inner_body
  ROOT %t.1 = (s32[], f32[2]) tuple(%i, %x)
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %la_fwd.9 = (s32[], f32[2]) while(%start), condition=%outer_condition, body=%outer_body
  %la_fwd.1 = f32[2,4]{1,0} custom-call(%q), custom_call_target="tpu_custom_call"
  %topk = f32[2]{0} custom-call(%q), custom_call_target="TopK"
  %all-reduce.1 = (f32[6]{0}, /*index=1*/s32[]{:T(128)}) all-reduce(%m, %n), channel_id=1, to_apply=%sum
  %all-gather-start.1 = ((f32[2]{0}, bf16[3]{0}), (f32[4]{0}, bf16[6]{0})) all-gather-start(%m, %n), channel_id=2
  %fusion.2 = bf16[8,4]{1,0} fusion(%y), kind=kLoop, calls=%fused
  ROOT %result = f32[2]{0} get-tuple-element(%la_fwd.9), index=1
}
"""  # noqa: E501


def test_collectives_are_counted_by_channel_and_by_the_loops_around_them():
    found = {(c.kind, c.bytes, c.runs) for c in hlo.collectives(_TEXT)}
    assert ("collective-permute", 16, 24 * 3) in found
    assert ("all-reduce", 28, 1) in found
    assert ("all-gather", 4 * 4 + 6 * 2, 1) in found  # the results of the start, not its operands
    gathers = [c for c in hlo.collectives(_TEXT) if c.source.endswith("mlp/dot_general")]
    assert len(gathers) == 1 and gathers[0].shape == "bf16[8,4]"
    assert len(found) == 4


def test_kernels_are_custom_calls_and_not_what_bears_their_name():
    (kernel,) = hlo.kernels(_TEXT)
    assert kernel == hlo.Kernel("la_fwd", calls=2, runs=24 + 1, vmem_bytes=327680)


def test_a_known_trip_count_wins_and_an_unknown_one_counts_once():
    noted = _TEXT.replace("body=%inner_body", 'body=%inner_body, x={"known_trip_count":{"n":"5"}}')
    unknown = _TEXT.replace("constant(3)", "parameter(1)")
    for text, runs in ((noted, 24 * 5), (unknown, 24)):
        assert {c.runs for c in hlo.collectives(text) if c.kind == "collective-permute"} == {runs}


@pytest.mark.parametrize(
    "shape, size",
    [("f32[]", 4), ("bf16[3,0]", 0), ("s4[3]", 1), ("f8e4m3fn[5]{0}", 5), ("(u8[2], c64[2])", 18)],
)
def test_sizes(shape, size):
    assert hlo.shape_bytes(shape) == size


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.collectives("module {}")


def test_the_collectives_of_a_shard_map_share_a_channel():
    text = """HloModule jit_f

ENTRY %main (a: f32[2]) -> f32[2] {
  %one = f32[2]{0} collective-permute(%a), channel_id=1, source_target_pairs={{0,1}}
  ROOT %two = f32[2]{0} collective-permute(%a), channel_id=1, source_target_pairs={{0,1}}
}
"""
    assert [c.bytes for c in hlo.collectives(text)] == [8, 8]
