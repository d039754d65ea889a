"""Compares gradients, losses and metrics of an actor update without the rows of advantage 0, and of one that takes its own
log-probabilities for old ones, with verl's own update.

The engine is verl's FSDPEngineWithLMHead with a tiny model: its own micro-batches, policy losses and backward passes.
"""

import functools
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_queue import KVBatchMeta
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.plugin.platform import platform_manager
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from rl_accel.errors import ConfigError, PatchRefused
from rl_accel.features import LosslessFlags
from rl_accel.patches.upstream import require_names
from rl_accel.patches.verl import reuse_in_worker, reuse_log_probs, skip_zero, trials
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.telemetry import metrics as telemetry
from verl_on_cpu.platform import PlatformCPU

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SILENT = ["vanilla", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl", "bypass_mode"]
"""verl's policy losses that rows with advantage 0 do not influence; the others of its registry are refused."""
LOUD = {
    "clip_cov": "change the gradient of others",
    "kl_cov": "change the gradient of others",
    "geo_mean": "change the gradient of others",
    "dro": "have a gradient",
}
FIXED_2 = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 64}
ROW_MEANS = {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"}
"""Metrics that are means over the rows of a micro-batch."""


@functools.cache
def actor():
    """verl's default actor configuration, as a worker has it."""
    section = "actor_rollout_ref.actor"
    run = VerlRun.compose("verl.trainer.main_ppo", [f"{section}.ppo_micro_batch_size_per_gpu=1"])
    return omega_conf_to_dataclass(run.get(section))


def ppo(mode="vanilla", aggregation="token-mean", **changes):
    """verl's actor loss; sums have a fixed divisor, since that of null is the longest response of a micro-batch."""
    policy_loss = replace(actor().policy_loss, loss_mode=mode, dro_beta=0.1)
    if mode == "bypass_mode":
        policy_loss = replace(policy_loss, rollout_correction={"rollout_is": "token"})
    changes = {"loss_scale_factor": 50, "loss_agg_mode": aggregation, "policy_loss": policy_loss, **changes}
    return functools.partial(ppo_loss, config=replace(actor(), global_batch_info={}, **changes))


def make_model(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **changes)).to(dtype).train()


def make_engine(module, dtype=torch.float32, cls="FSDPEngineWithLMHead"):
    from verl.workers.engine.fsdp import transformer_impl

    engine = object.__new__(getattr(transformer_impl, cls))
    engine.__dict__.update(
        module=module,
        ulysses_sequence_parallel_size=1,
        use_ulysses_sp=False,
        ulysses_device_mesh=None,
        pad_to_length=False,
        engine_config=SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False),
        _autocast_dtype=dtype,
        scaler=None,
    )
    return engine


def make_batch(lengths, advantages, packing, *, seed=0, holes=0.0, **more):
    """A mini-batch as TransferQueue hands it over; row n has a response of lengths[n] tokens with advantage advantages[n]."""
    random = torch.Generator().manual_seed(seed)
    fields = {}
    for number, (length, advantage) in enumerate(zip(lengths, advantages, strict=True)):
        prompt = 2 + number % 3
        mask = (torch.rand(length, generator=random) >= holes).long()
        tokens = torch.randint(61, (prompt + length,), generator=random)
        row = {
            "input_ids": tokens,
            "position_ids": torch.arange(prompt + length),
            "prompts": tokens[:prompt],
            "responses": tokens[prompt:],
            "response_mask": mask,
            "loss_mask": torch.cat([torch.zeros(prompt, dtype=torch.long), mask]),
            "old_log_probs": -3 - 2 * torch.rand(length, generator=random),
            "advantages": float(advantage) * mask,
        }
        for name, value in row.items():
            fields.setdefault(name, []).append(value)
    nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in fields.items()}
    constants = {"temperature": 1.0, "global_batch_size": len(lengths), "use_remove_padding": True}
    return tu.get_tensordict(nested, {**constants, **packing, **more})


def run_on_cpu(patch):
    """verl's engine on CPU tensors in this process."""
    patch.setattr(platform_manager, "_current_platform", PlatformCPU())


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        run_on_cpu(patch)
        yield
    torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)


def stock(engine, batch, loss):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    return FSDPEngine.forward_backward_batch(engine, batch, loss)


@pytest.fixture(scope="module")
def skipping():
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    return skip_zero._make(FSDPEngine.forward_backward_batch, LosslessFlags(enable=True))


def update(function, batch, loss, dtype=torch.float32, module=None):
    """Gradients, output and the rows that were computed, of one mini-batch."""
    engine, computed = make_engine(module or make_model(dtype), dtype), []
    engine.module.register_forward_pre_hook(
        lambda _module, _args, words: computed.append(int(words["position_ids"].eq(0).sum())), with_kwargs=True
    )
    output = function(engine, batch.clone(), loss)
    gradients = {name: p.grad for name, p in engine.module.named_parameters()}
    return gradients, output, computed


def apart(ours, theirs):
    """The norm of the difference of all gradients, relative to the norm of ``theirs``."""
    norms = [torch.stack([g[name].norm(dtype=torch.float64) for name in theirs]).norm() for g in (ours, theirs)]
    differences = [(ours[name] - theirs[name]).norm(dtype=torch.float64) for name in theirs]
    return 0.0 if not any(norms) else float(torch.stack(differences).norm() / norms[1])


ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}
"""The largest difference of gradients that another packing of rows may make."""


def equal(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


PAIRS = list(itertools.product(SILENT, AGGREGATIONS))
SHIFTED = {(mode, AGGREGATIONS[number % len(AGGREGATIONS)]) for number, mode in enumerate(SILENT)}
"""Pairs in which every loss and every aggregation is."""


@pytest.mark.parametrize(
    ("mode", "aggregation"), [pytest.param(*pair, marks=() if pair in SHIFTED else pytest.mark.full) for pair in PAIRS]
)
def test_gradients_are_verls_for_every_loss_and_aggregation(skipping, mode, aggregation):
    loss = ppo(mode, aggregation)
    batch = make_batch([9, 20, 3, 14, 30, 7], [0.7, 0, -1.2, 0, 0, 2.0], DYNAMIC, holes=0.2)
    wanted, theirs, _ = update(stock, batch, loss)
    result, ours, computed = update(skipping, batch, loss)
    assert sum(computed) == 3
    assert apart(result, wanted) < ROUNDING[torch.float32]
    assert sum(ours["loss"]) == pytest.approx(sum(theirs["loss"]), rel=1e-5)
    assert {*ours["metrics"]} == {*theirs["metrics"]} | {
        f"rl_accel/skip_zero/{name}" for name in ("rows", "tokens", "seconds_saved")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_equal_packing_gives_equal_bits(skipping, size, remove_padding, dtype):
    """Zero rows in micro-batches of their own: the other micro-batches are the same, and theirs add exact zeros."""
    packing = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": size, "use_remove_padding": remove_padding}
    batch = make_batch([9, 20, 3, 14, 30, 7, 8, 5], [0.7, -0.1, 0, 0, -1.2, 0.4, 0, 0], packing, holes=0.2)
    wanted, theirs, _ = update(stock, batch, ppo(), dtype)
    result, ours, computed = update(skipping, batch, ppo(), dtype)
    assert len(computed) == 4 // size
    assert equal(result, wanted)
    assert sum(ours["loss"]) == sum(theirs["loss"])
    assert ours["metrics"]["actor/pg_loss"].aggregate() == theirs["metrics"]["actor/pg_loss"].aggregate()


@pytest.mark.slow
@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("packing", [FIXED_2, DYNAMIC], ids=["fixed", "dynamic"])
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.0, 0.0, 0.5, -2.0])), min_size=4, max_size=10).filter(
        lambda rows: len(rows) % 2 == 0
    ),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 99),
)
def test_random_shapes_and_masks(skipping, packing, remove_padding, rows, holes, seed):
    """Multi-turn masks, rows without a trained token, mini-batches of zero rows alone: gradients to the rounding of each type."""
    lengths, advantages = zip(*rows, strict=True)
    packing = {**packing, "use_remove_padding": remove_padding}
    batch = make_batch(lengths, advantages, packing, seed=seed, holes=holes)
    for dtype, rounding in ROUNDING.items():
        wanted, theirs, _ = update(stock, batch, ppo(aggregation="token-sum"), dtype)
        result, ours, _ = update(skipping, batch, ppo(aggregation="token-sum"), dtype)
        assert apart(result, wanted) < rounding
        assert sum(ours["loss"]) == pytest.approx(sum(theirs["loss"]), rel=1e-4, abs=1e-4)


def test_a_mini_batch_of_zero_rows_keeps_its_shortest_rows_and_its_optimiser_step(skipping):
    batch = make_batch([9, 20, 3, 14], [0, 0, 0, 0], FIXED_2)
    result, _, computed = update(skipping, batch, ppo())
    assert len(computed) == 1
    assert all(gradient is not None and not gradient.any() for gradient in result.values())
    assert skip_zero._choose_rows([True] * 4, [9, 20, 3, 14], 2) == [0, 2]


def test_a_mini_batch_without_zero_rows_is_verls(skipping):
    batch = make_batch([9, 20, 3, 14], [1, -1, 0.5, 2], DYNAMIC)
    wanted, theirs, rows = update(stock, batch, ppo())
    result, ours, computed = update(skipping, batch, ppo())
    assert computed == rows
    assert equal(result, wanted)
    ours = {name: value for name, value in ours["metrics"].items() if not name.startswith("rl_accel/")}
    assert {name: value.values for name, value in ours.items()} == {
        name: value.values for name, value in theirs["metrics"].items()
    }


def test_only_means_over_rows_differ_among_the_metrics(skipping):
    batch = make_batch([9, 20, 3, 14], [1, 0, 0.5, 0], DYNAMIC)
    (_, theirs, _), (_, ours, _) = (update(function, batch, ppo()) for function in (stock, skipping))
    for name in {*theirs["metrics"]} - ROW_MEANS:
        assert ours["metrics"][name].aggregate() == pytest.approx(theirs["metrics"][name].aggregate(), rel=1e-5)


def test_padding_is_left_out_but_counted_as_no_response(skipping):
    """verl pads a batch with short rows in which no token is trained."""
    batch = make_batch([9, 20, 3, 14], [1, 0, 0, 0], DYNAMIC)
    for field in ("response_mask", "loss_mask"):
        batch[field].unbind()[2].zero_()
    _, output, computed = update(skipping, batch, ppo())
    left_out = batch["input_ids"].offsets().diff()[[1, 3]].sum()
    assert computed == [1]
    assert output["metrics"]["rl_accel/skip_zero/rows"].aggregate() == 2
    assert output["metrics"]["rl_accel/skip_zero/tokens"].aggregate() == left_out


def test_the_estimate_leaves_out_the_fixed_costs_of_a_mini_batch_and_is_never_above_its_mean():
    def fixed_costs(tokens):
        return tokens, 1.0 + 0.001 * tokens

    assert skip_zero._seconds_of(500, [fixed_costs(10)]) == 0.0  # nothing is known of a token yet
    assert skip_zero._seconds_of(500, [fixed_costs(n) for n in (10, 900, 30, 400)]) == pytest.approx(0.5)
    first_is_slow = [(10, 9.0), *(fixed_costs(n) for n in (900, 30, 400))]
    assert skip_zero._seconds_of(500, first_is_slow) <= 500 * 1.9 / 900
    assert skip_zero._seconds_of(500, [(100, 1.0), (200, 0.5), (300, 9.0)]) <= 500 * 0.5 / 200


def test_the_last_mini_batch_of_a_step_reports_what_the_step_has_left_out(skipping):
    engine, loss, reports = make_engine(make_model()), ppo(), []
    for last in (False, False, True, True):
        batch = make_batch([9, 20, 3, 14], [1, 0, 0.5, 0], DYNAMIC, update_lr_scheduler=last)
        metrics = skipping(engine, batch, loss)["metrics"]
        reports.append(metrics["rl_accel/skip_zero/rows"].aggregate() if "rl_accel/skip_zero/rows" in metrics else None)
    assert reports == [None, None, 6.0, 2.0]


def test_a_row_that_may_not_be_finite_is_trained_as_by_verl(skipping):
    batch = make_batch([9, 20, 3, 14], [1, 0, 0.5, 0], DYNAMIC)
    batch["old_log_probs"].values()[9 + 4] = float("-inf")
    assert skip_zero._find_zero_rows(batch) == [False, False, False, True]
    batch["advantages"].values()[-1] = float("nan")
    assert not any(skip_zero._find_zero_rows(batch))


def test_forward_passes_critics_and_other_data_are_verls(skipping):
    seen = []
    ours = skip_zero._make(lambda *arguments: seen.append(arguments), LosslessFlags(enable=True))
    batch = make_batch([9, 20], [0, 0], DYNAMIC)
    calls = [
        (make_engine(make_model()), batch, None, True),
        (make_engine(make_model(), cls="FSDPEngineWithValueHead"), batch, "value_loss", False),
        (make_engine(make_model()), batch.exclude("advantages"), "sft_loss", False),
        (make_engine(make_model()), make_batch([9], [0], DYNAMIC, return_model_output=True), "ppo_loss", False),
    ]
    for call in calls:
        ours(*call)
    assert [(a[0], a[2:]) for a in seen] == [(a[0], a[2:]) for a in calls]
    assert all(a[1] is b[1] for a, b in zip(seen, calls, strict=True))


DROPOUT = {"attention_dropout": 0.1}
OBSTACLES = [
    ({}, {}, {"calculate_entropy": True}, "actor.calculate_entropy = False, found True"),
    ({}, DROPOUT, {}, r"dropout of the model = 0, found Qwen2Attention.attention_dropout = 0.1"),
    ({"entropy_coeff": 0.1}, {}, {}, "have a gradient"),
    ({"use_kl_loss": True}, {}, {}, "have a gradient"),
    *(({"mode": mode}, {}, {}, f"found {mode} with loss_agg_mode token-mean .*{why}") for mode, why in LOUD.items()),
    ({"aggregation": "seq-mean-token-sum-norm", "loss_scale_factor": None}, {}, {}, "change the gradient of others"),
]


@pytest.mark.parametrize(("of_loss", "of_model", "of_batch", "message"), OBSTACLES)
def test_what_zero_advantages_do_not_silence_is_refused_by_name_and_left_to_verl_in_auto(
    of_loss, of_model, of_batch, message, caplog
):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    batch = make_batch([9, 20, 3], [1, 0, 0], DYNAMIC, **of_batch)
    batch["ref_log_prob"] = batch["old_log_probs"].clone()
    engine = make_engine(make_model(**of_model))
    with pytest.raises(ConfigError, match=message) as refused:
        skip_zero._make(None, LosslessFlags(enable=True))(engine, batch, ppo(**of_loss))
    assert "\n" not in str(refused.value)
    calls = []

    def original(*arguments):
        calls.append(arguments)

    functools.update_wrapper(original, FSDPEngine.forward_backward_batch)
    automatic = skip_zero._make(original, LosslessFlags())
    loss = ppo(**of_loss)
    for _ in range(2):
        automatic(engine, batch, loss)
    assert [call[1] is batch for call in calls] == [True, True]
    assert caplog.text.count("skip_zero stays off") == 1


def test_every_loss_that_verl_registers_is_tried_here():
    assert {*POLICY_LOSS_REGISTRY} == {*SILENT, *LOUD}


def test_a_loss_that_needs_other_data_is_refused_with_what_it_said():
    def mine(model_output, data, dp_group=None):
        return data["my_field"].sum(), {}

    assert "it cannot be tried: KeyError" in skip_zero.influence_of_zeros(mine)


@pytest.mark.parametrize("sampling", [{"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.5}, {}])
def test_a_loss_that_drops_unlikely_rows_is_tried_with_rows_that_it_keeps(sampling):
    def influence(**more):
        correction = {"loss_type": "reinforce", "rollout_is": "token", **sampling, **more}
        loss_mode = replace(actor().policy_loss, loss_mode="bypass_mode", rollout_correction=correction)
        return skip_zero.influence_of_zeros(ppo(policy_loss=loss_mode))

    assert influence() == ""
    assert influence(rollout_is_batch_normalize=True) == "rows with advantage 0 change the gradient of others"

    def dropping_all(model_output, data, dp_group=None):
        return 0 * model_output["log_probs"].values().sum(), {}

    assert skip_zero.influence_of_zeros(dropping_all) == "it cannot be tried: it drops rows of every trial"


def test_in_auto_a_loss_of_the_users_own_is_not_tried_since_it_may_keep_a_state(caplog, monkeypatch):
    from verl.trainer.ppo import core_algos

    calls = []

    def annealed(**given):
        calls.append(len(given["advantages"]))
        return core_algos.compute_policy_loss_vanilla(**given)

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "annealed", annealed)
    batch = make_batch([9, 20, 3], [1, 0, 0], {**DYNAMIC, "max_token_len_per_gpu": 4096})
    for name, mode in {"annealed": "annealed", "a function": "vanilla"}.items():
        loss = ppo(mode)
        mine = loss if mode == "annealed" else lambda loss=loss, **given: loss(**given)
        ours = skip_zero._make(type(make_engine(None)).forward_backward_batch, LosslessFlags())
        assert update(ours, batch, mine)[2] == [3], name
    assert calls == [3]
    assert caplog.text.count("loss_mode = a loss of verl's own, found ") == 2
    named = skip_zero._make(type(make_engine(None)).forward_backward_batch, LosslessFlags(enable=True))
    assert update(named, batch, ppo("annealed"))[2] == [1]


def test_a_training_step_that_other_code_has_replaced_is_left_to_it(monkeypatch):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    monkeypatch.setattr(FSDPEngineWithLMHead, "forward_step", lambda *given: None)
    named = skip_zero._make(None, LosslessFlags(enable=True))
    with pytest.raises(
        ConfigError, match=r"own training step: .*forward_step is already replaced by .*test_actor_update"
    ):
        named(make_engine(make_model()), make_batch([9, 20], [1, 0], DYNAMIC), ppo())


def test_a_trial_draws_no_random_numbers_of_the_run():
    before = torch.get_rng_state()
    skip_zero.influence_of_zeros(ppo("clip_cov"))
    assert torch.equal(before, torch.get_rng_state())


def test_a_function_that_makes_no_micro_batches_is_refused():
    (patch,) = skip_zero.SWITCHES
    with pytest.raises(PatchRefused, match="no longer uses prepare_micro_batches and forward_step"):
        require_names(replace, patch.uses, patch.target)


# -- reuse_log_probs: one optimizer step a batch, whose own log-probabilities are the old ones -------------------------------


class Worker:
    """What reuse_log_probs uses of verl's TrainingWorker."""

    rank = 0

    def __init__(self, loss, forward_backward=stock, **model):
        self.engine = make_engine(make_model(**model))
        self.engine.compute_entropy_from_logits = entropy_from_logits
        self.loss_fn = loss
        self._forward_backward = forward_backward

    def train_mini_batch(self, data):
        output = self._forward_backward(self.engine, data, self.loss_fn)
        return tu.get_tensordict({}, {"metrics": output["metrics"]})

    def gradients(self):
        return {name: p.grad for name, p in self.engine.module.named_parameters()}


def mini_batch(packing, **more):
    """A batch whose old log-probabilities are unknown, and the size of its only mini-batch."""
    batch = make_batch([9, 20, 3, 14], [1, 0, -0.5, 0], packing, holes=0.2, **more)
    batch["old_log_probs"] = torch.full_like(batch["old_log_probs"], float("nan"))
    tu.assign_non_tensor(batch, mini_batch_size=4, epochs=1)
    return batch


def forward_pass(batch):
    """verl's log-probabilities and entropy of ``batch``."""
    engine = Worker(None).engine
    data = batch.clone()
    tu.assign_non_tensor(data, calculate_entropy=True)
    with torch.no_grad():
        return type(engine).forward_backward_batch(engine, data, None, True)["model_output"]


NAMED, AUTOMATIC = LosslessFlags(enable=True), LosslessFlags()


def asked(worker, wanted, batch, settings=NAMED):
    update = reuse_in_worker._make(Worker.train_mini_batch, settings)
    data = batch.clone()
    tu.assign_non_tensor(data, **{reuse_in_worker.KEY: wanted})
    return update(worker, data)


ONE_BY_ONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("packing", [ONE_BY_ONE, FIXED_2, DYNAMIC], ids=["one", "two", "dynamic"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_one_update_gives_the_bits_of_a_forward_pass_and_an_update(packing, remove_padding, with_entropy):
    batch = mini_batch({**packing, "use_remove_padding": remove_padding}, calculate_entropy=with_entropy)
    loss = ppo(entropy_coeff=0.1 * with_entropy)
    wanted = forward_pass(batch)
    known = batch.clone()
    known["old_log_probs"] = response_from_nested(wanted["log_probs"], batch["response_mask"])
    theirs, ours = Worker(loss), Worker(loss)
    metrics = tu.get(theirs.train_mini_batch(known), "metrics")
    output = asked(ours, reuse_in_worker.REUSE, batch)
    assert equal(ours.gradients(), theirs.gradients())
    for name in ("log_probs", "entropy"):
        assert torch.equal(output[name].values(), wanted[name].values())
    found = tu.get(output, "metrics")
    assert found.pop(reuse_in_worker.SHARE) == [1.0]
    assert {n: v.values for n, v in found.items()} == {n: v.values for n, v in metrics.items()}
    assert ours.loss_fn is loss
    assert "prepare_model_outputs" not in vars(ours.engine)


def test_rows_that_skip_zero_leaves_out_get_a_forward_pass_alone(skipping):
    batch = mini_batch(ONE_BY_ONE)
    wanted = forward_pass(batch)
    known = batch.clone()
    known["old_log_probs"] = response_from_nested(wanted["log_probs"], batch["response_mask"])
    theirs, ours = Worker(ppo()), Worker(ppo(), skipping)
    theirs.train_mini_batch(known)
    for _ in range(2):  # skip_zero decides once
        ours.engine.module.zero_grad()
        output = asked(ours, reuse_in_worker.REUSE, batch)
        assert equal(ours.gradients(), theirs.gradients())
        for name in ("log_probs", "entropy"):
            assert torch.equal(output[name].values(), wanted[name].values())
    found = tu.get(output, "metrics")
    lengths = batch["input_ids"].offsets().diff()
    assert found[reuse_in_worker.SHARE] == [int(lengths[[0, 2]].sum()) / int(lengths.sum())]
    assert found["rl_accel/skip_zero/rows"].aggregate() == 2


def test_the_engine_of_megatron_computes_the_entropy_itself(monkeypatch):
    """Not run on Megatron: its engine gives ``ppo_loss`` the same outputs, and reads ``calculate_entropy`` from the batch."""
    worker = Worker(ppo())
    monkeypatch.setattr(reuse_in_worker, "_ENGINES", ("another", type(worker.engine).__name__))
    batch = mini_batch(ONE_BY_ONE)
    wanted = forward_pass(batch)
    output = asked(worker, reuse_in_worker.REUSE, batch)
    assert torch.equal(output["entropy"].values(), wanted["entropy"].values())
    assert "actor/entropy_loss" not in tu.get(output, "metrics")


def test_a_batch_with_more_than_one_step_is_an_error():
    batch = mini_batch(ONE_BY_ONE)
    tu.assign_non_tensor(batch, epochs=2)
    with pytest.raises(RuntimeError, match=r"wants one step of 4 rows, found \(4, 2\)"):
        asked(Worker(ppo()), reuse_in_worker.REUSE, batch)


JUMPS = {"kl_cov"}


def test_a_loss_is_tried_where_old_and_new_log_probabilities_are_equal():
    def strange(model_output, data, dp_group=None):
        log_probs = model_output["log_probs"].values()
        return (log_probs - log_probs.detach()).sum() * data["my_field"].sum(), {}

    assert "it cannot be tried: KeyError" in trials.find_jump(strange)
    jumps = {mode for mode in POLICY_LOSS_REGISTRY if trials.find_jump(ppo(mode))}
    assert jumps == JUMPS


def test_workers_are_asked_before_the_trainer_relies_on_them(caplog):
    def answer(settings, loss=None, **model):
        worker = Worker(loss or ppo(), **model)
        batch = mini_batch(ONE_BY_ONE)
        batch["old_log_probs"] = torch.zeros_like(batch["old_log_probs"])
        return tu.get(asked(worker, reuse_in_worker.ASK, batch, settings), "metrics")[reuse_in_worker.WORKS]

    assert answer(NAMED) == answer(AUTOMATIC) == [1.0]
    with pytest.raises(ConfigError, match=r"dropout of the model = 0, found .*attention_dropout = 0.1"):
        answer(NAMED, **DROPOUT)
    assert answer(AUTOMATIC, **DROPOUT) == [0.0]
    assert answer(AUTOMATIC, lambda **given: ppo()(**given)) == [0.0]
    assert answer(NAMED, lambda **given: ppo()(**given)) == [1.0]
    assert caplog.text.count("reuse_log_probs stays off: rl_accel.reuse_log_probs wants") == 2


@pytest.mark.parametrize(
    ("rows", "changes", "is_reused"),
    [
        (8, {}, True),
        (16, {}, False),  # more trajectories than responses, which verl pads to two mini-batches
        (6, {}, False),  # a group filter that left less
        (8, {"actor_rollout_ref.actor.ppo_epochs": 2}, False),
        (8, {"trainer.critic_warmup": 4}, False),
    ],
)
def test_a_batch_that_gets_another_number_of_steps_is_verls(rows, changes, is_reused):
    overrides = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"]
    overrides += [f"{key}={value}" for key, value in changes.items()]
    run = VerlRun.compose("verl.trainer.main_ppo", overrides)
    trainer = SimpleNamespace(config=run.config, global_steps=3)
    assert reuse_log_probs.gets_one_step(trainer, rows) == is_reused


def test_a_trainer_with_a_method_of_its_own_before_the_update_is_refused():
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.v1 import trainer_sync

    for cls, methods in (
        (trainer_sync.PPOTrainerSync, {"_step_once", "_compute_advantage", "_compute_old_log_prob", "_update_actor"}),
        (ray_trainer.RayPPOTrainer, {"fit", "_compute_old_log_prob", "_update_actor"}),
    ):
        reuse_log_probs._check_trainer(object.__new__(cls))
        for name in methods:
            own = type("Own", (cls,), {name: lambda self: None})
            with pytest.raises(ConfigError, match=f"{name} of the trainer = verl's own, found Own"):
                reuse_log_probs._check_trainer(object.__new__(own))


class Store:
    """Rows of a batch as TransferQueue keeps them, in this process."""

    def __init__(self, batch):
        self.fields = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}

    def kv_batch_get(self, keys, partition_id, select_fields):
        return tu.get_tensordict({name: self.fields[name] for name in select_fields if name in self.fields}).clone()

    def kv_batch_put(self, keys, partition_id, fields):
        self.fields |= dict(fields.items())
        return KVBatchMeta(keys=keys, partition_id=partition_id, tags=[{}] * len(keys))


class Workers:
    """verl's group of one worker, which reads and writes the store."""

    def __init__(self, store, update):
        self.store, self._update = store, update
        self.worker, self.forward_passes = Worker(ppo()), 0

    def _data(self, batch):
        constants = {"use_remove_padding": True, **ONE_BY_ONE}
        return tu.get_tensordict(self.store.fields, {**batch.extra_info, **constants}).clone()

    def compute_log_prob(self, batch):
        self.forward_passes += 1
        self.store.fields |= forward_pass(self._data(batch))
        return batch

    def update_actor(self, batch):
        self.worker.engine.module.zero_grad()
        output = self._update(self.worker, self._data(batch))
        metrics = {**tu.get(output, "metrics"), "mfu": 0.5}
        if not output.batch_size:
            return {"metrics": metrics}
        self.store.fields |= {name: output[name] for name in ("log_probs", "entropy")}
        return KVBatchMeta(keys=batch.keys, partition_id="train", tags=batch.tags, extra_info={"metrics": [metrics]})


def test_the_v1_trainer_leaves_out_the_forward_pass_and_logs_what_verl_logs(monkeypatch):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.trainer.ppo.v1 import trainer_base, trainer_sync

    verls = trainer_base.PPOTrainer
    overrides = ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"]
    overrides += ["actor_rollout_ref.rollout.calculate_log_probs=True"]
    config = VerlRun.compose("verl.trainer.main_ppo", overrides).config
    rows = make_batch([9, 20, 3, 14], [1, 0, -0.5, 0.3], ONE_BY_ONE, holes=0.2)
    rows["rollout_log_probs"] = rows.pop("old_log_probs")

    def step(trainer, forward, update):
        lengths = rows["input_ids"].offsets().diff().tolist()
        tags = [{"seq_len": length} for length in lengths]
        batch = KVBatchMeta(keys=list("abcd"), partition_id="train", tags=tags, extra_info={"temperature": 1.0})
        metrics = {}
        forward(trainer, batch, metrics=metrics)
        update(trainer, batch, metrics=metrics)
        return metrics

    def begin(update):
        store = Store(rows)
        monkeypatch.setattr(trainer_base, "tq", store)
        trainer = object.__new__(trainer_sync.PPOTrainerSync)
        trainer.config, trainer.global_steps = config, 1
        trainer.actor_rollout_wg = Workers(store, update)
        return trainer

    stock = begin(Worker.train_mini_batch)
    wanted = step(stock, verls._compute_old_log_prob, verls._update_actor)
    stored = trainer_base.tq.kv_batch_get("abcd", "train", ["response_mask", "rollout_log_probs", "old_log_probs"])
    padded = DataProto(batch=stored.to_padded_tensor())
    wanted |= compute_rollout_correction_and_add_to_batch(padded, config.algorithm.rollout_correction)[1]

    ours = begin(reuse_in_worker._make(Worker.train_mini_batch, NAMED))
    forward = reuse_log_probs._deferring(reuse_log_probs._V1, verls._compute_old_log_prob)
    update = reuse_log_probs._reusing(reuse_log_probs._V1, verls._update_actor)
    telemetry.drain()
    for number in range(3):
        found = step(ours, forward, update)
        assert ours.actor_rollout_wg.forward_passes == 1  # the first step is verl's
        numbers = {name for name in wanted if number or not name.startswith("rollout_corr/")}
        assert {name: found[name] for name in numbers} == {name: wanted[name] for name in numbers}
        assert found.keys() <= wanted.keys()
        assert equal(ours.actor_rollout_wg.worker.gradients(), stock.actor_rollout_wg.worker.gradients())
        logged = telemetry.drain()
        assert (logged.get("rl_accel/reuse_log_probs/share") == 1) == (number > 0)
    again = trainer_base.tq.kv_batch_get("abcd", "train", ["old_log_probs"])
    assert torch.equal(again["old_log_probs"].values(), stored["old_log_probs"].values())
    assert {"actor/entropy", "training/rollout_probs_diff_mean", "rollout_corr/kl"} <= wanted.keys()


class LegacyWorkers:
    """verl's group of one worker, which receives whole batches."""

    def __init__(self, update):
        self.worker, self._update, self.forward_passes = Worker(ppo()), update, 0

    def compute_log_prob(self, data):
        self.forward_passes += 1
        tu.assign_non_tensor(data, **ONE_BY_ONE)
        return tu.get_tensordict(forward_pass(data), {"metrics": {"mfu": 0.5}})

    def update_actor(self, data):
        self.worker.engine.module.zero_grad()
        tu.assign_non_tensor(data, **ONE_BY_ONE)
        output = self._update(self.worker, data)
        metrics = {**tu.get(output, "metrics"), "mfu": [0.5]}
        return tu.get_tensordict(dict(output.exclude("metrics").items()), {"metrics": metrics})


def test_the_legacy_trainer_leaves_out_the_forward_pass_and_logs_what_verl_logs():
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer as Verls
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.debug.metrics import calculate_debug_metrics
    from verl.utils.metric import reduce_metrics

    overrides = ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"]
    config = VerlRun.compose("verl.trainer.main_ppo", overrides).config
    lengths = torch.tensor([9, 20, 3, 14])
    random = torch.Generator().manual_seed(0)
    response = (torch.arange(20) < lengths[:, None]).long()
    attention = torch.cat([torch.ones(4, 3, dtype=torch.long), response], dim=1)
    tokens = torch.randint(61, attention.shape, generator=random)
    fields = {
        "input_ids": tokens,
        "prompts": tokens[:, :3],
        "responses": tokens[:, 3:],
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0),
        "response_mask": response,
        "advantages": torch.tensor([1.0, 0.0, -0.5, 0.3])[:, None] * response,
        "rollout_log_probs": (-3 - torch.rand(4, 20, generator=random)) * response,
    }

    def step(trainer, forward, update):
        """What ``fit`` of verl's trainer does between the rollout and the log."""
        batch = DataProto.from_dict(dict(fields), meta_info={"temperature": 1.0})
        result, _ = forward(trainer, batch)
        entropy = agg_loss(result.batch.pop("entropys"), response, config.actor_rollout_ref.actor.loss_agg_mode)
        batch = batch.union(result)
        metrics = {"actor/entropy": entropy.item(), **calculate_debug_metrics(batch)}
        batch, corrections = compute_rollout_correction_and_add_to_batch(batch, config.algorithm.rollout_correction)
        output = update(trainer, batch)
        return batch, {**metrics, **corrections, **reduce_metrics(output.meta_info["metrics"])}

    def begin(update):
        trainer = object.__new__(Verls)
        trainer.config, trainer.global_steps, trainer.actor_rollout_wg = config, 1, LegacyWorkers(update)
        return trainer

    stock = begin(Worker.train_mini_batch)
    stored, wanted = step(stock, Verls._compute_old_log_prob, Verls._update_actor)
    ours = begin(reuse_in_worker._make(Worker.train_mini_batch, NAMED))
    forward = reuse_log_probs._deferring(reuse_log_probs._Legacy, Verls._compute_old_log_prob)
    update = reuse_log_probs._reusing(reuse_log_probs._Legacy, Verls._update_actor)
    for _ in range(3):
        batch, found = step(ours, forward, update)
        assert ours.actor_rollout_wg.forward_passes == 1  # the first step is verl's
        assert found == wanted
        assert torch.equal(batch.batch["old_log_probs"], stored.batch["old_log_probs"])
        assert equal(ours.actor_rollout_wg.worker.gradients(), stock.actor_rollout_wg.worker.gradients())
    telemetry.drain()


def two_ranks(rank, folder):
    """One process of two: gradients of FSDP2 for each packing, stock and without zero rows, as JSON in ``folder``."""
    from torch.distributed.fsdp import fully_shard
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    torch.set_num_threads(1)
    run_on_cpu(pytest.MonkeyPatch())
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    ours = skip_zero._make(FSDPEngine.forward_backward_batch, LosslessFlags(enable=True))
    result = {}
    # Rank 1 has one trained row, or none; rank 0 has long ones, which need more micro-batches than rank 1 has such rows.
    rows = {
        "some": [[0.7, 0, 1.0, -1.0, 0, 0], [0, 0, 0, 0.3, 0, 0]],
        "none": [[0.7, 0, 1.0, -1.0, 0, 0], [0] * 6],
        "all zero": [[0] * 6, [0] * 6],
    }
    lengths = [[9, 20, 50, 55, 30, 7], [12, 18, 4, 6, 11, 3]][rank]
    for name, advantages in rows.items():
        for packing in (FIXED_2, DYNAMIC):
            batch = make_batch(lengths, advantages[rank], packing, seed=rank, global_batch_size=12)
            both = []
            for function in (stock, ours):
                model = make_model()
                for layer in (*model.model.layers, model):
                    fully_shard(layer)
                gradients, output, computed = update(function, batch, ppo(), module=model)
                both.append({key: value.full_tensor() for key, value in gradients.items()})
            metrics = {key: value.aggregate() for key, value in output["metrics"].items()}
            counts = [len(computed), sum(computed)]
            wanted, gradients = both
            result[f"{name} {packing['use_dynamic_bsz']}"] = [apart(gradients, wanted), counts, metrics]
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(result, file)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_agree_on_their_micro_batches(tmp_path, forking):
    ranks = [subprocess.Popen([*forking, __file__, str(rank), str(tmp_path)]) for rank in (0, 1)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert {*first} == {f"{name} {dynamic}" for name in ("some", "none", "all zero") for dynamic in (True, False)}
    for name, (difference, (micro_batches, rows), metrics) in first.items():
        assert difference < ROUNDING[torch.float32], name
        assert [micro_batches, rows] == second[name][1], name
        wanted = {"all zero False": 2, "all zero True": 1}.get(name, 4 if "False" in name else 3)
        assert rows == wanted, name
        for key in ("rows", "tokens"):
            assert metrics[f"rl_accel/skip_zero/{key}"] > 0
        assert metrics["rl_accel/skip_zero/rows"] == 12 - 2 * wanted


if __name__ == "__main__":
    two_ranks(int(sys.argv[1]), sys.argv[2])
