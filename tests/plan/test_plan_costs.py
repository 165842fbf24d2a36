"""What a step must move and send, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thalweg.errors import CommandError
from thalweg.kernels.cpu.library import reason_missing
from thalweg.plan import plan
from thalweg.plan.costs import bytes_moved, flops
from thalweg.plan.items import Item, Place, item_of, shard
from thalweg.plan.models import Model, Tensor
from thalweg.plan.optimizers import setting_of
from thalweg.plan.ranks import choose_owners, kernel_peak, messages
from thalweg.rules import RULES
from thalweg.show.arguments import Given

MATRIX = Tensor("w", (4096, 4096))
N = MATRIX.elements
FOUR = Place("torch", "cpu", "auto", 4, "fsdp2")


def setting(name: str, **options: Any) -> Any:
    return setting_of(name, [Given(name, key, value) for key, value in options.items()])


@pytest.mark.parametrize(
    ("name", "options", "floor"),
    [
        ("SGD", {}, 20),  # read p, g, m; write p, m
        ("SGD", {"momentum": 0.0}, 12),
        ("SGD", {"momentum_dtype": "bfloat16"}, 16),
        ("AdamW", {}, 28),
        ("AdamW", {"max_grad_norm": 1.0}, 32),  # gradients are read once more
        ("AdamW", {"state_dtype": "bfloat16"}, 20),
        ("LARS", {}, 28),
        ("LAMB", {}, 40),
        # m comes back rounded from memory, so the second pass computes it again, and reads g for that
        ("LAMB", {"momentum_dtype": "bfloat16"}, 38),
        ("Adafactor", {"factored": False}, 32),
        ("Adafactor", {"factored": False, "clip_threshold": None, "scale_parameter": False}, 20),
    ],
)
def test_floors_are_those_of_the_passes(name: str, options: dict[str, Any], floor: int) -> None:
    assert bytes_moved(setting(name, **options), MATRIX) == floor * N


@pytest.mark.parametrize(
    ("options", "floor"),
    [({}, 24), ({"momentum": 0.9}, 32), ({"clip_threshold": None}, 20), ({"scale_parameter": False}, 20)],
)
def test_rows_and_columns_are_all_that_adafactor_adds(options: dict[str, Any], floor: int) -> None:
    assert bytes_moved(setting("Adafactor", **options), MATRIX) == floor * N + 2 * 4 * (4096 + 4096)


def test_parameters_of_16_bits_move_half() -> None:
    narrow = Tensor("w", MATRIX.shape, "bfloat16")
    assert bytes_moved("SGD", narrow) == bytes_moved("sgd", narrow) == (2 + 2 + 4 + 2 + 4) * N
    assert bytes_moved("LARS", narrow) == 18 * N
    assert bytes_moved("AdamW", narrow) == 22 * N
    assert round(bytes_moved("Adafactor", narrow) / N) == 12
    assert bytes_moved("LAMB", narrow) == (2 + 2 + 8 + 8 + 2 + 8 + 2) * N


def counted(setting: Any, tensor: Tensor, **step: bool) -> int:
    return flops(Item(tensor, setting), **step)


def test_products_of_kron_are_counted() -> None:
    """Between refreshes each dense factor is applied twice; a factor that is diagonal needs no product."""
    kron = setting("Kron")
    assert counted(kron, Tensor("w", (300, 300)), refresh=False) == 4 * 2 * 300**3
    assert counted(kron, Tensor("w", (300, 90)), refresh=False) == 2 * 2 * 90 * 90 * 300
    assert counted(kron, Tensor("b", (300,))) == 0
    assert counted(kron, Tensor("w", (300, 300))) > 3 * counted(kron, Tensor("w", (300, 300)), refresh=False) / 2
    assert counted(setting("LAMB"), MATRIX) == 0


def test_what_kron_moves_between_refreshes() -> None:
    n = 300 * 300
    products = 4 * 3 * 4 * n  # two operands and a result, four times
    assert bytes_moved(setting("Kron"), Tensor("w", (300, 300)), refresh=False) == products + 20 * n
    assert bytes_moved(setting("Kron"), Tensor("b", (300,)), refresh=False) == 20 * 300


def test_shards_are_cut_as_torch_cuts_them() -> None:
    assert [shard(0, 2, rank) for rank in range(2)] == [0, 0]
    torch = pytest.importorskip("torch")
    for size, world in ((8, 4), (7, 4), (5, 4), (1, 4), (9, 8)):
        chunks = [len(chunk) for chunk in torch.chunk(torch.empty(size), world)]
        assert [shard(size, world, rank) for rank in range(world)] == chunks + [0] * (world - len(chunks))


def sizes(name: str, *tensors: Tensor, **options: Any) -> list[int]:
    """Bytes of the messages of a step on four ranks, round after round."""
    return list(messages([item_of(tensor, setting(name, **options), FOUR, 1) for tensor in tensors]).values())


def test_sums_that_cross_ranks() -> None:
    matrix, vector = Tensor("w", (512, 256)), Tensor("b", (512,))
    assert sizes("LARS", matrix) == [2 * 4]  # |p| and |g|
    assert sizes("LAMB", matrix) == [3 * 4]  # and |u|
    assert sizes("Adafactor", vector) == [3 * 4]  # RMS(p), RMS(g) and RMS(u)
    assert sizes("Adafactor", matrix) == [4 * 256 + 3 * 4, 4]  # sums of columns, two means of rows, RMS(p)
    assert sizes("Adafactor", Tensor("w", (3, 512, 256))) == [4, 4]  # rows and columns are on one rank
    assert sizes("Adafactor", Tensor("w", (512, 3, 256))) == [4 * (3 * 256 + 3 + 3 + 1), 4]
    assert sizes("LARS", matrix, vector, matrix) == [3 * 2 * 4]
    assert sizes("LAMB", matrix, max_grad_norm=1.0) == [4, 3 * 4]
    assert sizes("LAMB", Tensor("w", (4, 8, 8)), stacked_axes=1) == []
    assert sizes("LAMB", Tensor("scale", ())) == []
    # in the widest dtype of its figures; finite numbers take a round of their own, of all gradients before all else
    assert sizes("LARS", Tensor("a", (8,), "bfloat16"), Tensor("b", (8,), "float64")) == [4 * 8]
    assert sizes("LARS", matrix, on_nonfinite="raise") == [2 * 4, 4]
    assert sizes("LARS", matrix, on_nonfinite="skip") == [4, 2 * 4, 4]


def test_owners_take_the_longest_first() -> None:
    kron = setting("Kron")

    def owned(tensors: list[Tensor], world: int) -> list[int | None]:
        place = Place("torch", "cpu", "auto", world, "fsdp2")
        return [item.owner for item in choose_owners([item_of(tensor, kron, place) for tensor in tensors], place, 0)]

    tensors = [Tensor("a", (400, 400)), Tensor("b", (200, 200)), Tensor("c", (200, 200)), Tensor("d", (50,))]
    assert owned(tensors, 2) == [0, 1, 1, 1]
    assert owned(tensors, 1) == [0, 0, 0, 0]
    assert owned([*tensors, Tensor("e", ())], 3) == [0, 1, 2, 1, None]


# ---- plans of several ranks

SMALL = Model("small", "", (Tensor("w", (256, 130)), Tensor("b", (256,)), Tensor("odd", (9, 4))))


def share(name: str, world: int, layout: str, **options: Any) -> Any:
    given = [Given(name, key, value) for key, value in options.items()]
    return plan(SMALL, optimizers=[name], options=given, world=world, layout=layout, device="cpu").costs[0].share


@pytest.mark.parametrize("name", [name for name in RULES if name != "Muon"])
def test_ddp_is_everything_on_every_rank_and_sends_nothing(name: str) -> None:
    assert share(name, 8, "ddp") == share(name, 1, "ddp")
    assert share(name, 8, "ddp").sent_bytes == 0
    assert share(name, 1, "fsdp2") == share(name, 1, "ddp")


def test_lists_of_parts_are_not_cut() -> None:
    """Every bucket waits for the others in the middle of its arithmetic."""
    many = Model("many", "", tuple(Tensor(f"w{i}", (4096, 1024)) for i in range(8)))
    found = plan(many, optimizers=["LAMB"], world=2, layout="fsdp2", engine="foreach").costs[0].share
    alone = plan(many, optimizers=["LAMB"], engine="foreach").costs[0].share
    assert found.peak_bytes is not None
    assert alone.peak_bytes is not None
    assert found.peak_bytes > 6.9 * found.parameter_bytes
    assert alone.peak_bytes < 2 * alone.parameter_bytes


@pytest.mark.skipif(reason_missing() is not None, reason="there is no native core here")
def test_native_code_steps_parts_in_place() -> None:
    many = Model("many", "", tuple(Tensor(f"w{i}", (4096, 1024)) for i in range(8)))
    found = plan(many, optimizers=["LARS", "LAMB"], world=2, layout="fsdp2", device="cpu", engine="fused")
    assert {cost.share.engine for cost in found.costs} == {"fused"}
    assert all((cost.share.peak_bytes or 0) < 2**20 for cost in found.costs)
    found = plan(many, optimizers=["LAMB"], world=2, layout="fsdp2", device="cpu")
    assert found.costs[0].share.engine == "foreach"


@pytest.mark.skipif(reason_missing() is not None, reason="there is no native core here")
def test_parts_that_native_code_does_not_step() -> None:
    where = dict(world=2, layout="fsdp2", device="cpu", engine="fused")
    with pytest.raises(CommandError, match="there is no native code of Kron for sharded parameters"):
        plan(SMALL, optimizers=["Kron"], **where)
    factored = Model("one", "", (Tensor("w", (256, 256)),))
    with pytest.raises(CommandError, match="for 'w': there is no native code of Adafactor with rows and columns"):
        plan(factored, optimizers=["Adafactor"], **where)


@pytest.mark.parametrize("engine", ["auto", "fused"])
def test_kernels_for_gpus_step_parts_in_place(engine: str) -> None:
    many = Model("many", "", tuple(Tensor(f"w{i}", (4096, 1024)) for i in range(8)))
    names = ["SGD", "AdamW", "LARS", "LAMB", "Adafactor"]
    found = plan(many, optimizers=names, world=2, layout="fsdp2", device="cuda", engine=engine)
    assert {cost.share.engine for cost in found.costs} == {"fused"}
    for cost in found.costs:
        # tables, and at most the message with sums of columns
        assert 0 < (cost.share.peak_bytes or 0) < cost.share.parameter_bytes / 20


@pytest.mark.parametrize(("shape", "message"), [((128, 2**20), 4 * (2**20 + 3)), ((2**20, 128), 4 * (128 + 3))])
def test_the_largest_message_is_in_the_peak_of_parts_on_gpus(shape: tuple[int, int], message: int) -> None:
    """Sums of columns are sent together; those of rows are not divided, and stay."""
    model = Model("one", "", (Tensor("w", shape),))
    found = plan(model, optimizers=["Adafactor"], world=2, layout="fsdp2", device="cuda").costs[0].share
    kept = kernel_peak([item_of(model.tensors[0], setting("Adafactor"), replace(FOUR, world=2))], [])
    assert found.peak_bytes == kept + -(-message // 512) * 512


def test_parts_that_kernels_for_gpus_do_not_step() -> None:
    stacks = Model("stacks", "", (Tensor("w", (8, 40, 30)), Tensor("v", (8, 40, 30))))
    where = dict(world=2, layout="fsdp2", device="cuda")
    stacked = [Given("", "stacked_axes", 1)]
    found = plan(stacks, optimizers=["LAMB"], options=stacked, **where).costs[0].share
    assert found.engine == "foreach"
    assert (found.peak_bytes or 0) > found.parameter_bytes
    with pytest.raises(CommandError, match=r"cannot run LAMB for 'w': it is sharded, .* with stacked_axes=0"):
        plan(stacks, optimizers=["LAMB"], options=stacked, engine="fused", **where)
    with pytest.raises(CommandError, match="cannot run Muon for 'w': it is sharded, and owners have library products"):
        plan(stacks, optimizers=["Muon"], options=stacked, engine="fused", **where)
    assert plan(stacks, optimizers=["Muon"], engine="fused", **where).costs[0].share.engine == "fused"
    # whoever owns a tensor has its slices whole
    assert plan(stacks, optimizers=["Kron"], options=stacked, engine="fused", **where).costs[0].share.engine == "fused"


def test_all_squares_are_known_in_one_round() -> None:
    """Adafactor's formula asks for RMS(u) by itself, but where all squares are kept it needs no other sum first."""
    matrix, vector, wide = Tensor("w", (512, 256)), Tensor("b", (512,)), Tensor("d", (512,), "float64")

    def told(*tensors: Tensor, **options: Any) -> list[int]:
        parts = [item_of(tensor, setting("Adafactor", **options), FOUR, 1) for tensor in tensors]
        return list(messages([replace(part, by_kernels=part.tensor.dtype != "float64") for part in parts]).values())

    assert told(vector) == [3 * 4]
    assert told(vector, on_nonfinite="raise") == [3 * 4, 4]
    assert told(matrix, vector) == [4 * 256 + 3 * 4 + 3 * 4, 4]
    assert told(vector, wide) == [6 * 8]  # lists and kernels share messages
    assert told(vector, wide, max_grad_norm=1.0) == [2 * 8, 6 * 8]


def test_owners_of_slices_own_all_of_them() -> None:
    model = Model("stack", "", (Tensor("experts", (8, 40, 30)),))
    stacked = [Given("", "stacked_axes", 1)]
    found = plan(model, optimizers=["Kron"], options=stacked, world=4, layout="fsdp2", device="cpu").costs[0].share
    alone = plan(model, optimizers=["Kron"], options=stacked, device="cpu").costs[0].share
    assert found.rank == 0
    assert found.product_flops == alone.product_flops
