"""Tests ``enable()`` in the driver of verl V1 runs: it reaches every process, training is correct, metrics are in verl's log."""

import pytest

GRPO = (
    "trainer.v1.trainer_mode=colocate_async",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.ref.fsdp_config.strategy=fsdp2",
    "actor_rollout_ref.ref.strategy=fsdp2",
)


@pytest.mark.full
def test_grpo_on_a_cluster_that_runs_before_the_driver(train, start_ray, probe_environment, read_processes, tmp_path):
    """``colocate_async``, flags given in the script once it is connected: the latest moment at which that can work."""
    far, metrics = tmp_path / "far", tmp_path / "metrics.jsonl"
    far.mkdir()
    # Processes of the run have the environment of the cluster, not of the driver.
    run_on_cpu = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    run_on_cpu["VERL_FILE_LOGGER_PATH"] = str(metrics)
    address = start_ray(num_cpus=16, num_gpus=1, **run_on_cpu, **probe_environment(far))
    begin = f"""
import ray, rl_accel
ray.init(address="{address}")
rl_accel.enable(gae=True, advantages=True, sampler=True)
"""
    # 16 prompts in one update a step: at the first the policy still is the reference.
    run = train(*GRPO, begin=begin, batch=(16, 4), folder=tmp_path)
    assert list(run.steps) == [1, 2]
    assert "dtype mismatch" not in run.log
    for metrics in run.steps.values():
        assert 0 < metrics["actor/grad_norm"] < 1e4
        assert metrics["rl_accel/advantages/applied"] == 0.0, (
            "GRPO has no serial loop; the comparison of gae does not count"
        )
    # Later steps of this mode go on with what older weights began.
    assert run.steps[1]["training/rollout_probs_diff_max"] < 1e-4
    assert run.steps[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert run.steps[1]["rl_accel/sampler/polls"] >= 1  # a later step may find its samples finished

    processes = read_processes(far)
    assert len({process.role for process in processes}) == 4, processes
    for process in processes:
        assert process.requested["gae"] == "by name", process
        # A process that never computes an advantage need not import the module.
        sure = process.role in ("TaskRunnerV1", "WorkerDict")
        assert process.states["gae"] == {"applied"} or (process.states["gae"] == {"waiting"} and not sure), process
