"""``rl-accel plan --lengths`` on rollouts that slime itself has saved."""

from rl_accel.plan.workload import read_lengths


def test_lengths_of_saved_rollouts(slime_root, tmp_path):
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample

    for rollout in range(2):
        samples = [
            Sample(group_index=2 * rollout + n // 2, index=n, response_length=10 * rollout + n + 1, reward=0.5)
            for n in range(4)
        ]
        save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), samples, rollout_id=rollout, evaluation=False)
    validation = {"math": {"samples": samples}}
    save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), validation, rollout_id=1, evaluation=True)
    assert read_lengths(tmp_path).seen.tolist() == [[1, 2], [3, 4], [11, 12], [13, 14]]
