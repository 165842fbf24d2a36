"""State is taken out, put back and kept in files, to the last bit; what does not fit is refused."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_arrays import (
    CASES,
    SHAPES,
    Make,
    bfloat16,
    bits,
    every_case,
    fingerprint,
    gradients,
    model,
    refused,
    train,
    two_cases,
)

from thalweg.errors import OptionError, StateError
from thalweg.numpy import LAMB, LARS, Adafactor, Optimizer

SUFFIXES = [".npz", ".safetensors"]


def path_in(folder: Path, suffix: str) -> Path:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    return folder / f"state{suffix}"


def by_dict(source: Optimizer, target: Optimizer, folder: Path) -> None:
    target.load_state_dict(source.state_dict())


def by_file(suffix: str, source: Optimizer, target: Optimizer, folder: Path) -> None:
    path = path_in(folder, suffix)
    source.save(path)
    target.load(path)


def by_pickled_dict(source: Optimizer, target: Optimizer, folder: Path) -> None:
    target.load_state_dict(pickle.loads(pickle.dumps(source.state_dict())))


WAYS = {"dict": by_dict, "pickled dict": by_pickled_dict, **{s: partial(by_file, s) for s in SUFFIXES}}
every_way = pytest.mark.parametrize("hand_over", WAYS.values(), ids=WAYS)
HandOver = Callable[[Optimizer, Optimizer, Path], None]


#: Numbers (0-d arrays) have tests of their own below.
SHAPED = {name: shape for name, shape in SHAPES.items() if shape != ()}


def stepped(make: Make, steps: int = 3) -> Optimizer:
    optimizer = make()
    train(optimizer, model(shapes=SHAPED), gradients(steps, shapes=SHAPED))
    return optimizer


class TestResume:
    def check(
        self,
        make: Make,
        hand_over: HandOver,
        folder: Path,
        dtype: Any = "float32",
        steps: tuple[int, ...] = (3,),
    ) -> None:
        """A run that is broken off and resumed ends where one in one go does."""
        grads = gradients(6, dtype, SHAPED)
        whole, params = make(), model(dtype, SHAPED)
        train(whole, params, grads)
        for at in steps:
            first, resumed, again = make(), make(), model(dtype, SHAPED)
            train(first, again, grads[:at])
            hand_over(first, resumed, folder)
            assert bits(resumed.state) == bits(first.state)
            train(resumed, again, grads[at:])
            assert bits(again) == bits(params), f"resumed after step {at}"
            assert bits(resumed.state) == bits(whole.state)

    @every_case
    @every_way
    def test_to_the_last_bit(self, make: Make, hand_over: HandOver, tmp_path: Path) -> None:
        self.check(make, hand_over, tmp_path, steps=(1, 3, 4))

    @pytest.mark.parametrize("case", ["LARS", "LAMB", "Adafactor factored", "Kron"])
    @every_way
    def test_with_momentum_in_bfloat16(self, case: str, hand_over: HandOver, tmp_path: Path) -> None:
        bfloat16()
        self.check(partial(CASES[case], momentum_dtype="bfloat16"), hand_over, tmp_path)

    @every_case
    @every_way
    def test_with_all_state_in_bfloat16(self, make: Make, hand_over: HandOver, tmp_path: Path) -> None:
        bfloat16()
        self.check(partial(make, state_dtype="bfloat16"), hand_over, tmp_path)

    @every_case
    @pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
    def test_in_other_dtypes_with_stochastic_rounding(self, make: Make, dtype: str, tmp_path: Path) -> None:
        kind = bfloat16() if dtype == "bfloat16" else dtype
        self.check(partial(make, rounding="stochastic"), partial(by_file, ".npz"), tmp_path, kind)

    @two_cases
    @every_way
    def test_with_a_global_step_and_a_schedule(self, make: Make, hand_over: HandOver, tmp_path: Path) -> None:
        def lr(t: int) -> float:
            return 0.1 / t

        grads, whole, params = gradients(6, shapes=SHAPED), make(lr=lr, global_step=True), model(shapes=SHAPED)
        first, again = make(lr=lr, global_step=True), model(shapes=SHAPED)
        for t, step in enumerate(grads):
            if t == 3:
                resumed = make(lr=lr, global_step=True)
                hand_over(first, resumed, tmp_path)
                first = resumed
            for optimizer, arrays in ((whole, params), (first, again)):
                for name, weights in arrays.items():
                    optimizer.update(name, weights, step[name])
                optimizer.end_iteration()
        assert bits(again) == bits(params) != bits(model(shapes=SHAPED))
        assert first.iteration == 6

    @every_case
    @every_way
    def test_of_a_number(self, make: Make, hand_over: HandOver, tmp_path: Path) -> None:
        whole, first, resumed = make(), make(), make()
        params, again = np.ones(()), np.ones(())
        for t in range(6):
            if t == 3:
                hand_over(first, resumed, tmp_path)
                first = resumed
            for optimizer, weights in ((whole, params), (first, again)):
                optimizer.update("w", weights, np.array(0.5 - 0.2 * t))
        assert bits(again) == bits(params) != bits(np.ones(()))
        assert bits(whole.state) == bits(resumed.state)

    def test_noise_and_refreshes_matter_here(self) -> None:
        """Or else resuming Kron in the middle would show nothing."""
        params = train(CASES["Kron"](), model(), gradients(8))
        for other in (dict(seed=1), dict(precond_update_probability=0.5)):
            assert bits(params) != bits(train(CASES["Kron"](**other), model(), gradients(8)))

    @two_cases
    @every_way
    def test_over_a_state_of_its_own(self, make: Make, hand_over: HandOver, tmp_path: Path) -> None:
        """Going back to an earlier state: what came after is forgotten."""
        optimizer, early = stepped(make, 5), stepped(make, 2)
        optimizer.update("later", np.ones(3), np.ones(3))
        hand_over(early, optimizer, tmp_path)
        assert bits(optimizer.state) == bits(early.state)
        assert optimizer.num_parameters == early.num_parameters


class TestStateDict:
    def test_what_is_in_it(self) -> None:
        optimizer = stepped(partial(CASES["LAMB"], global_step=True))
        saved = optimizer.state_dict()
        assert {key: value for key, value in saved.items() if key != "state"} == {
            "layout": 1,
            "optimizer": "LAMB",
            "version": 1,
            "lr": 0.05,
            "iteration": 3,
        }
        assert bits(saved["state"]) == bits(optimizer.state)

    @every_case
    def test_it_is_a_copy_on_the_way_out_and_in(self, make: Make) -> None:
        optimizer, other = stepped(make), make()
        saved = optimizer.state_dict()
        before = fingerprint(optimizer)
        other.load_state_dict(saved)
        for entries in saved["state"].values():
            for key in entries:
                entries[key] = entries[key] * 0 - 1
        saved["state"]["new"] = {"step": np.array(1)}
        assert fingerprint(optimizer) == before
        assert bits(other.state) == bits(optimizer.state)
        again = make()
        saved = optimizer.state_dict()
        again.load_state_dict(saved)
        for entries in saved["state"].values():
            for entry in entries.values():
                if isinstance(entry, np.ndarray):
                    entry.fill(7)
        assert bits(again.state) == bits(optimizer.state)

    def test_steps_taken_later_do_not_reach_it(self) -> None:
        optimizer, params = CASES["Kron"](), model()
        train(optimizer, params, gradients(2))
        saved = optimizer.state_dict()
        before = bits(saved)
        train(optimizer, params, gradients(3))
        assert bits(saved) == before

    @every_way
    def test_a_learning_rate_that_was_a_number_is_restored(self, hand_over: HandOver, tmp_path: Path) -> None:
        source, target = LARS(0.25), LARS(0.5)
        hand_over(source, target, tmp_path)
        assert target.lr == 0.25

    @every_way
    def test_a_function_stays(self, hand_over: HandOver, tmp_path: Path) -> None:
        def lr(t: int) -> float:
            return 0.5

        own, number = LARS(lr), LARS(0.125)
        hand_over(LARS(0.25), own, tmp_path)
        assert own.lr is lr
        hand_over(own, number, tmp_path)
        assert number.lr == 0.125

    @every_way
    def test_names_survive(self, hand_over: HandOver, tmp_path: Path) -> None:
        names = [1, "1", 0, -3, 2**70, "", "a/b\\c.d", "about", "step", "größe", "名前", "with 'quotes' \"\n", "0.step"]
        source, target = LAMB(0.1), LAMB(0.1)
        for index, name in enumerate(names):
            source.update(name, np.ones(index), np.ones(index))
        hand_over(source, target, tmp_path)
        assert [(type(name), name) for name in target.state] == [(type(name), name) for name in names]
        assert bits(list(target.state.values())) == bits(list(source.state.values()))

    @every_way
    def test_a_fresh_optimizer_has_a_state_too(self, hand_over: HandOver, tmp_path: Path) -> None:
        target = stepped(CASES["LARS"])
        hand_over(CASES["LARS"](), target, tmp_path)
        assert target.num_parameters == 0


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": (dict(optimizer="LARS"), "state of LARS and cannot be loaded into LAMB"),
    "a newer layout": (dict(layout=2), "layout 2.*update thalweg"),
    "other shapes": (
        dict(state={"conv": {"step": 1, "exp_avg": np.ones(3), "exp_avg_sq": np.ones(3)}}),
        "state of 'conv' does not fit",
    ),
    "other entries": (
        dict(state={"conv": {"step": 1, "momentum_buffer": np.ones((2, 3, 2, 2))}}),
        "'conv' does not fit",
    ),
    "no step": (dict(state={"conv": {"exp_avg": np.ones(3)}}), "'conv' must .*have a 'step'"),
    "layout of text": (dict(layout="1"), "layout"),
    "no layout": (dict(layout=None), "layout"),
    "state that is a list": (dict(state=[1]), "state"),
    "no state": (dict(state=None), "state"),
    "no entries": (dict(state={"conv": 3}), "'conv' must map keys to arrays"),
}
BROKEN |= {
    "layout 0": (dict(layout=0), "layout"),
    "negative step": (dict(state={"new": {"step": -3}}), "step of 'new'"),
    "step of text": (dict(state={"new": {"step": "x"}}), "step of 'new'"),
    "step that is NaN": (dict(state={"new": {"step": np.nan}}), "step of 'new'"),
    "half a step": (dict(state={"new": {"step": 1.5}}), "step of 'new'"),
    "several steps": (dict(state={"new": {"step": np.ones(3)}}), "step of 'new'"),
    "text for numbers": (
        dict(state={"new": {"step": 1, "exp_avg": np.full(3, "x"), "exp_avg_sq": np.ones(3)}}),
        "state of 'new' must be floating point: 'exp_avg'",
    ),
    "complex numbers": (
        dict(state={"new": {"step": 1, "exp_avg": np.full(3, 1j), "exp_avg_sq": np.ones(3)}}),
        "state of 'new' must be floating point: 'exp_avg'",
    ),
    "negative iteration": (dict(iteration=-4), "iteration"),
    "iteration of text": (dict(iteration="x"), "iteration"),
    "a name that is none": (dict(state={("a",): {"step": 1}}), "name"),
    "lr of text": (dict(lr="x"), "lr"),
    "negative lr": (dict(lr=-1.0), "lr"),
}


class TestRefused:
    @pytest.mark.parametrize("kind", BROKEN)
    def test_what_does_not_fit_changes_nothing(self, kind: str) -> None:
        changes, said = BROKEN[kind]
        optimizer = stepped(CASES["LAMB"])
        with refused(StateError, said, optimizer):
            optimizer.load_state_dict({**optimizer.state_dict(), "lr": 0.5, "iteration": 9, **changes})

    @pytest.mark.parametrize("missing", ["layout", "optimizer", "lr", "iteration", "state"])
    def test_what_lacks_a_part(self, missing: str) -> None:
        optimizer = stepped(CASES["LAMB"])
        saved = {key: value for key, value in optimizer.state_dict().items() if key != missing}
        with refused(StateError, f"must have the keys.*{missing}", optimizer):
            optimizer.load_state_dict(saved)

    @pytest.mark.parametrize("other", [None, [], "state", 3, {}], ids=repr)
    def test_what_is_no_state_at_all(self, other: Any) -> None:
        optimizer = stepped(CASES["LAMB"])
        with refused(StateError, r"not an exported state or state_dict", optimizer):
            optimizer.load_state_dict(other)

    @every_case
    def test_another_shape_shows_at_the_next_step(self, make: Make) -> None:
        optimizer, saved = make(), make()
        saved.update("w", np.ones((4, 3), "float32"), np.ones((4, 3), "float32"))
        optimizer.load_state_dict(saved.state_dict())
        weights, good = np.ones((5, 7), "float32"), np.ones((2, 2), "float32")
        for params in ({"good": good, "w": weights}, {"w": weights, "good": good}):
            with refused(StateError, "state of 'w' does not fit.*clear_state", optimizer, params):
                optimizer.step(params, {name: np.ones_like(p) for name, p in params.items()})
        optimizer.update("w", np.ones((4, 3), "float32"), np.ones((4, 3), "float32"))
        assert optimizer.state["w"]["step"] == 2

    def test_other_options_show_at_the_next_step(self) -> None:
        optimizer, saved = Adafactor(factored=False), Adafactor(min_dim_size_to_factor=2)
        weights = np.ones((4, 3))
        saved.update("w", weights.copy(), np.ones((4, 3)))
        optimizer.load_state_dict(saved.state_dict())
        with refused(StateError, "'w'.*variance.*row_var.*restore the options", optimizer, weights):
            optimizer.update("w", weights, np.ones((4, 3)))

    @pytest.mark.parametrize("source", CASES)
    def test_every_other_optimizer_refuses_it(self, source: str) -> None:
        saved = stepped(CASES[source]).state_dict()
        for make in CASES.values():
            optimizer = make()
            if optimizer.rule.__name__ != saved["optimizer"]:
                with refused(StateError, f"{saved['optimizer']}.*{optimizer.rule.__name__}", optimizer):
                    optimizer.load_state_dict(saved)


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the description in an .npz file."""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    about = json.loads(str(arrays.pop("about")))
    np.savez(path, about=np.array(json.dumps(change(about))), **arrays)


class TestFiles:
    @two_cases
    def test_numpy_reads_them_without_pickle(self, make: Make, tmp_path: Path) -> None:
        optimizer = stepped(partial(make, state_dtype="float16"))
        optimizer.save(tmp_path / "state.npz")
        with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        assert all(x.dtype.kind in "fiuU" for x in arrays.values())
        held = [x.tobytes() for x in arrays.values()]
        for entries in optimizer.state.values():
            for entry in entries.values():
                assert entry.tobytes() in held

    def test_not_even_for_bfloat16(self, tmp_path: Path) -> None:
        bfloat16()
        stepped(partial(CASES["LAMB"], state_dtype="bfloat16")).save(tmp_path / "state.npz")
        with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
            assert all(file[key].dtype.kind in "fiuU" for key in file.files)

    def test_safetensors_reads_its_own(self, tmp_path: Path) -> None:
        numpy = pytest.importorskip("safetensors.numpy")
        optimizer = stepped(CASES["LAMB"])
        optimizer.save(tmp_path / "state.safetensors")
        held = [x.tobytes() for x in numpy.load_file(tmp_path / "state.safetensors").values()]
        assert optimizer.state["conv"]["exp_avg"].tobytes() in held

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_paths_may_be_text(self, suffix: str, tmp_path: Path) -> None:
        path, optimizer, loaded = str(path_in(tmp_path, suffix)), stepped(CASES["LARS"]), CASES["LARS"]()
        optimizer.save(path)
        loaded.load(path)
        assert bits(loaded.state) == bits(optimizer.state)
        assert os.listdir(tmp_path) == [Path(path).name]

    @pytest.mark.parametrize("name", ["state", "state.txt", "state.npy", "state.npz.gz", ".npz"])
    def test_other_endings_are_refused_and_nothing_is_written(self, name: str, tmp_path: Path) -> None:
        optimizer = stepped(CASES["LARS"])
        with refused(StateError, r"file name must end in .npz or .safetensors, got", optimizer):
            optimizer.save(tmp_path / name)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_the_file_that_is_not_there(self, suffix: str, tmp_path: Path) -> None:
        optimizer = stepped(CASES["LARS"])
        with refused(StateError, "there is no file .*state", optimizer):
            optimizer.load(path_in(tmp_path, suffix))

    @pytest.mark.parametrize("suffix", SUFFIXES)
    @pytest.mark.parametrize("fails", ["fsync", "replace"])
    def test_a_failed_write_leaves_the_old_file(
        self, suffix: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, optimizer = path_in(tmp_path, suffix), stepped(CASES["LAMB"])
        optimizer.save(path)
        before = path.read_bytes()
        optimizer.update("conv", model()["conv"], gradients(1)[0]["conv"])

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, fails, full)
            with pytest.raises(OSError, match="No space left"):
                optimizer.save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == [path.name]
        optimizer.save(path)
        assert path.read_bytes() != before

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_the_old_file_is_never_half_of_the_new(
        self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At the moment of replacement both are whole."""
        path, old, new = path_in(tmp_path, suffix), stepped(CASES["LAMB"], 1), stepped(CASES["LAMB"], 2)
        old.save(path)
        seen = []

        def replace(source: Any, target: Any, really: Any = os.replace) -> None:
            assert Path(source).parent == Path(target).parent  # one file system, so that it is one move
            loaded = CASES["LAMB"]()
            loaded.load(target)
            seen.append(bits(loaded.state) == bits(old.state))
            really(source, target)

        monkeypatch.setattr(os, "replace", replace)
        new.save(path)
        loaded = CASES["LAMB"]()
        loaded.load(path)
        assert seen == [True]
        assert bits(loaded.state) == bits(new.state)

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_a_truncated_file(self, suffix: str, tmp_path: Path) -> None:
        path, optimizer = path_in(tmp_path, suffix), stepped(CASES["Kron"])
        optimizer.save(path)
        content = path.read_bytes()
        for share in (0.0, 0.02, 0.5, 0.9, 0.999):
            path.write_bytes(content[: int(share * len(content))])
            with refused(StateError, "state.* is damaged, or not a state saved", optimizer):
                optimizer.load(path)

    def test_a_flipped_bit(self, tmp_path: Path) -> None:
        path, optimizer = tmp_path / "state.npz", stepped(CASES["LAMB"])
        optimizer.save(path)
        content = bytearray(path.read_bytes())
        at = content.index(optimizer.state["conv"]["exp_avg"].tobytes())
        content[at] ^= 1
        path.write_bytes(content)
        with refused(StateError, "is damaged", optimizer):
            optimizer.load(path)

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_what_is_no_such_file(self, suffix: str, tmp_path: Path) -> None:
        path, optimizer = path_in(tmp_path, suffix), stepped(CASES["LARS"])
        for content in [b"hello", b"\x93NUMPY", b"PK\x03\x04", b"\x80\x04N.", bytes(100)]:
            path.write_bytes(content)
            with refused(StateError, "is damaged, or not a state saved", optimizer):
                optimizer.load(path)

    def test_a_folder(self, tmp_path: Path) -> None:
        optimizer = stepped(CASES["LARS"])
        (tmp_path / "state.npz").mkdir()
        with refused(StateError, "is not a file", optimizer):
            optimizer.load(tmp_path / "state.npz")

    def test_arrays_of_others(self, tmp_path: Path) -> None:
        path, optimizer = tmp_path / "state.npz", stepped(CASES["LARS"])
        np.savez(path, weights=np.ones(3))
        with refused(StateError, "is damaged, or not a state saved", optimizer):
            optimizer.load(path)
        np.save(tmp_path / "one.npy", np.ones(3))
        (tmp_path / "one.npy").rename(path)
        with refused(StateError, "is damaged, or not a state saved", optimizer):
            optimizer.load(path)

    def test_tensors_of_others(self, tmp_path: Path) -> None:
        numpy = pytest.importorskip("safetensors.numpy")
        path, optimizer = tmp_path / "state.safetensors", stepped(CASES["LARS"])
        numpy.save_file({"weights": np.ones(3)}, path)
        with refused(StateError, "is damaged, or not a state saved", optimizer):
            optimizer.load(path)

    def test_a_pickle_is_never_opened(self, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> Any:
                return (Path.touch, (tmp_path / "opened",))

        path, optimizer = tmp_path / "state.npz", stepped(CASES["LARS"])
        optimizer.save(path)
        with np.load(path) as file:
            arrays = dict(file)
        arrays["0.momentum_buffer"] = np.array([Bomb()], dtype=object)
        np.savez(path, **arrays)
        with refused(StateError, "is damaged", optimizer):
            optimizer.load(path)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("about.npy", pickle.dumps(Bomb()))
        with refused(StateError, "is damaged", optimizer):
            optimizer.load(path)
        assert not (tmp_path / "opened").exists()

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda about: {**about, "parameters": None}, id="no parameters"),
            pytest.param(lambda about: {**about, "parameters": about["parameters"] * 2}, id="more than arrays"),
            pytest.param(lambda about: [about], id="a list"),
            pytest.param(lambda about: 3, id="a number"),
            pytest.param(
                lambda about: {**about, "parameters": [{"name": "a", "dtypes": {"step": "nothing"}}]}, id="dtype"
            ),
            pytest.param(lambda about: {**about, "parameters": [{"name": ["a"], "dtypes": {}}]}, id="name"),
        ],
    )
    def test_a_description_of_something_else(self, change: Callable[[Any], Any], tmp_path: Path) -> None:
        path, optimizer = tmp_path / "state.npz", stepped(CASES["LARS"])
        optimizer.save(path)
        rewritten(path, change)
        with refused(StateError, "is damaged|not a state", optimizer):
            optimizer.load(path)

    def test_a_file_that_cannot_be_read_is_closed(self, tmp_path: Path) -> None:
        path, optimizer = tmp_path / "state.npz", stepped(CASES["LARS"])
        path.write_bytes(b"PK\x03\x04")
        gc.collect()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            with refused(StateError, "is damaged", optimizer):
                optimizer.load(path)
            gc.collect()
        assert [str(warning.message) for warning in caught] == []

    def test_wrong_optimizer_and_newer_layout(self, tmp_path: Path) -> None:
        path, optimizer = tmp_path / "state.npz", stepped(CASES["LARS"])
        optimizer.save(path)
        other = stepped(CASES["LAMB"])
        with refused(StateError, "state of LARS and cannot be loaded into LAMB", other):
            other.load(path)
        rewritten(path, lambda about: {**about, "layout": 2})
        with refused(StateError, "layout 2.*update thalweg", optimizer):
            optimizer.load(path)

    def test_a_newer_layout_is_told_even_if_all_else_has_changed(self, tmp_path: Path) -> None:
        path, optimizer = tmp_path / "state.npz", stepped(CASES["LARS"])
        optimizer.save(path)
        rewritten(path, lambda about: {"layout": 2, "optimizer": "LARS"})
        with refused(StateError, "layout 2.*update thalweg", optimizer):
            optimizer.load(path)

    def test_without_safetensors_it_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        optimizer, path = stepped(CASES["LARS"]), tmp_path / "state.safetensors"
        path.write_bytes(b"old")
        monkeypatch.setitem(sys.modules, "safetensors", None)
        for act in (optimizer.save, optimizer.load):
            with refused(StateError, "pip install safetensors", optimizer):
                act(path)
        assert path.read_bytes() == b"old"

    def test_without_ml_dtypes_it_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bfloat16()
        stepped(partial(CASES["LARS"], momentum_dtype="bfloat16")).save(tmp_path / "state.npz")
        optimizer = LARS(0.1)
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        with refused(StateError, "bfloat16.*pip install ml_dtypes", optimizer):
            optimizer.load(tmp_path / "state.npz")
        for options in (dict(momentum_dtype="bfloat16"), dict(overrides=[("*", dict(momentum_dtype="bfloat16"))])):
            with pytest.raises(OptionError, match=r"momentum_dtype='bfloat16'.*pip install ml_dtypes"):
                LARS(0.1, **options)


@pytest.mark.parametrize("suffix", SUFFIXES)
@every_case
def test_parameters_of_fortran_order(make: Make, suffix: str, tmp_path: Path) -> None:
    optimizer, loaded, weights = make(), make(), np.asfortranarray(model()["encoder.0.weight"])
    for step in gradients(3):
        optimizer.update("w", weights, np.asfortranarray(step["encoder.0.weight"]))
    by_file(suffix, optimizer, loaded, tmp_path)
    assert bits(loaded.state) == bits(optimizer.state)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_state_of_fortran_order_is_saved_by_its_numbers(suffix: str, tmp_path: Path) -> None:
    optimizer, loaded = stepped(CASES["LAMB"]), CASES["LAMB"]()
    turned = {
        name: {key: np.asfortranarray(entry) if entry.ndim else entry for key, entry in entries.items()}
        for name, entries in optimizer.state_dict()["state"].items()
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": turned})
    by_file(suffix, optimizer, loaded, tmp_path)
    assert bits(loaded.state) == bits(optimizer.state)
