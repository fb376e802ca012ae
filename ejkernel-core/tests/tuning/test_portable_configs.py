"""Portable configs: what they demand, which hints are used, which change nothing and which are refused."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

import ejkernel
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.modules.operations import configs
from ejkernel.modules.operations.configs import (
    AttentionConfig,
    BaseOperationConfig,
    BwdParams,
    FlashAttentionConfig,
    FwdParams,
    GatedDeltaRuleConfig,
    GroupedMatmulConfig,
    MultiLatentRaggedPageAttentionV2Config,
    RaggedPageAttentionv3Config,
)
from ejkernel.plugin import ConfigSpace

pytestmark = pytest.mark.filterwarnings("error")

CLASSES = [getattr(configs, name) for name in configs.__all__ if name.endswith("Config")]


@dataclasses.dataclass(frozen=True)
class Any1(BaseOperationConfig):
    """For every operation, with the fixture's knobs and one of another machine."""

    rows: int | None = None
    warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class Tiled(BaseOperationConfig):
    """For every operation, per phase."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    block_k: int | None = None


@pytest.mark.parametrize("made", CLASSES, ids=lambda made: made.__name__)
def test_every_class(made: type[BaseOperationConfig]) -> None:
    config = made()
    assert (config.platform, config.backend) == ("auto", "any")
    assert dataclasses.replace(config, platform="xla") == made("xla") != config
    assert hash(made()) == hash(config)
    assert made.from_json(config.to_json()) == config == made.from_dict(config.to_dict())
    assert pickle.loads(pickle.dumps(config)) == config
    assert not [f.name for f in dataclasses.fields(config) if getattr(config, f.name)][2:], "hints say something by default"
    with pytest.raises(TypeError, match="warp_speed"):
        made(warp_speed=9)  # pyright: ignore[reportCallIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.platform = "xla"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("made", CLASSES, ids=lambda made: made.__name__)
def test_operations_that_a_class_is_for_exist(made: type[BaseOperationConfig]) -> None:
    assert {*made.operations} <= {*OPERATIONS}
    assert bool(made.operations) == (made is not BaseOperationConfig)


def test_round_trip_with_params() -> None:
    config = FlashAttentionConfig("xla", fwd_params=FwdParams(q_blocksize=64), bwd_params={"kv_blocksize": 32})  # pyright: ignore[reportArgumentType]
    assert config.bwd_params == BwdParams(kv_blocksize=32)
    assert FlashAttentionConfig.from_json(config.to_json()) == config
    three = MultiLatentRaggedPageAttentionV2Config(num_kv_pages_per_block=(1, 2, 3))
    assert MultiLatentRaggedPageAttentionV2Config.from_json(three.to_json()) == three
    assert dataclasses.replace(RaggedPageAttentionv3Config(num_queries_per_block=4), num_kv_pages_per_block=8).to_dict() == {
        **RaggedPageAttentionv3Config().to_dict(),
        "num_queries_per_block": 4,
        "num_kv_pages_per_block": 8,
    }


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda: GroupedMatmulConfig(block_m="8"), TypeError),
        (lambda: GroupedMatmulConfig(block_m=8.0), TypeError),
        (lambda: GroupedMatmulConfig(block_m=True), TypeError),
        (lambda: GroupedMatmulConfig(block_m=(8, 8)), TypeError),
        (lambda: GroupedMatmulConfig(bypass_xla_tiling=1), TypeError),
        (lambda: GroupedMatmulConfig(block_m=0), ValueError),
        (lambda: FlashAttentionConfig(fwd_params=BwdParams()), TypeError),
        (lambda: FlashAttentionConfig(fwd_params={"q_block": 3}), TypeError),
        (lambda: FwdParams(kv_blocksize=3, blocksize_k=4), ValueError),
        (lambda: BaseOperationConfig(platform=3), TypeError),
        (lambda: BaseOperationConfig(backend="gpus"), ValueError),
        (lambda: MultiLatentRaggedPageAttentionV2Config(num_kv_pages_per_block=(1, 0, 2)), ValueError),
    ],
)
def test_refused_when_made(made: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"got|unexpected keyword"):
        made()


def test_known_hints_are_used_and_others_change_nothing(world: Any) -> None:
    assert world.run(cfg=Any1(rows=3, num_stages=7)) == world.Blocks(3)
    assert world.tier(cfg=Any1(rows=3)) == "override"
    assert world.run(cfg=Any1(num_stages=7)) == world.Blocks()
    assert world.tier(cfg=Any1(num_stages=7)) == "heuristic"


def test_nothing_said_leaves_it_to_the_other_tiers(world: Any) -> None:
    ejkernel.tuning.remember(world.entry(16))
    assert world.run(cfg=BaseOperationConfig()) == world.Blocks(16)
    assert world.run(cfg=Any1(warps=1)) == world.Blocks(8, 1)
    ejkernel.tuning.forget()


def test_both_phases(world: Any) -> None:
    world.register("backward")
    assert world.grad(cfg=Any1(rows=3, warps=1)) == [world.Blocks(3, 1), world.GradBlocks(16, 1)]


def test_illegal_hint_is_refused(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_odd(self: Any) -> None:
        if self.rows % 2:
            raise ValueError("odd rows")

    monkeypatch.setattr(world.Blocks, "__post_init__", refuse_odd)
    with pytest.raises(ValueError, match=r"cfg: got rows=3.*expected legal values for Blocks\(rows, warps\); odd rows"):
        world.run(cfg=Any1(rows=3))


def test_platform_without_knobs(world: Any) -> None:
    assert ejkernel.explain("rms_norm", world.x, cfg=Any1("xla", rows=3)).chosen == "xla"
    assert world.tier(cfg=Any1("xla", rows=3)) == ""


def test_platform_and_backend_are_demands(world: Any) -> None:
    def chosen(**options: Any) -> Any:
        return ejkernel.explain("rms_norm", world.x, **options).chosen

    assert chosen() == "fixture"
    assert (
        chosen(cfg=Any1("xla")) == chosen(cfg=Any1("XLA"), platform="auto") == chosen(cfg=Any1("xla"), platform="xla") == "xla"
    )
    assert chosen(cfg=Any1(), platform="xla") == "xla"
    assert chosen(cfg=Any1(backend="cpu")) == "fixture"
    with pytest.raises(ValueError, match=r"cfg\.platform: got 'xla', expected 'auto' or 'fixture', as platform= says"):
        chosen(cfg=Any1("xla"), platform="fixture")
    with pytest.raises(ValueError, match=r"cfg\.backend: got 'gpu', expected 'any' or 'cpu'"):
        chosen(cfg=Any1(backend="gpu"))
    with pytest.raises(ValueError, match="tritn"):
        chosen(cfg=Any1("tritn"))


def test_config_of_another_operation(world: Any) -> None:
    with pytest.raises(TypeError, match="cfg: got GatedDeltaRuleConfig, expected a config of rms_norm, not of delta_rule"):
        world.run(cfg=GatedDeltaRuleConfig(chunk_size=16))


def test_overlay(world: Any) -> None:
    with ejkernel.overlay({"rms_norm": Any1(rows=3, num_stages=2)}):
        assert world.run() == world.Blocks(3)
        assert world.run(cfg={"rows": 4}) == world.Blocks(4)
    with ejkernel.overlay({"rms_norm": Any1(num_stages=2)}):
        assert world.run() == world.Blocks()
    with (
        pytest.raises(ValueError, match=r"platform='xla', expected 'auto'; choose platforms with ejkernel.use"),
        ejkernel.overlay({"rms_norm": Any1("xla")}),
    ):
        pass


@dataclasses.dataclass(frozen=True)
class Shared:
    """One config of both phases, in the manner of attention on XLA."""

    block_q: int = 1
    block_k: int = 2
    block_q_backward: int = 3
    block_k_backward: int = 4


@dataclasses.dataclass(frozen=True)
class Own:
    """A config of one phase."""

    block_q: int = 5
    block_k: int = 6


def space(made: type) -> ConfigSpace:
    return ConfigSpace(made, lambda call, target: made(), lambda call, target: [made()])


TILES = Tiled(fwd_params=FwdParams(q_blocksize=10), bwd_params=BwdParams(q_blocksize=20, kv_blocksize=30), block_k=40)


def test_phases_that_share_a_config(world: Any) -> None:
    world.register("forward", space(Shared), platform="shared", priority=2000)
    world.register("backward", space(Shared), platform="shared", priority=2000)
    assert world.grad(cfg=TILES) == [Shared(10, 40, 20, 30)] * 2
    assert world.grad(cfg=dataclasses.replace(TILES, bwd_params=None, block_k=None)) == [Shared(10, 2, 3, 4)] * 2


def test_phases_with_configs_of_their_own(world: Any) -> None:
    world.register("forward", space(Own), platform="own", priority=2000)
    world.register("backward", space(Own), platform="own", priority=2000)
    assert world.grad(cfg=TILES) == [Own(10, 40), Own(20, 30)]
    assert world.grad(cfg=dataclasses.replace(TILES, bwd_params=None)) == [Own(10, 40), Own(5, 40)]


def test_attention_config_says_both_phases() -> None:
    names = ("block_q", "block_k", "block_q_backward", "block_k_backward")
    assert AttentionConfig(block_q=16, weights_block_q=8).knobs("forward", names) == {"block_q": 16, "block_q_backward": 16}
