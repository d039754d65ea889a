"""Makes verl save the state of its data loader after each validation, as a checkpoint between two training steps would.

The file also has the number of training prompts that TransferQueue holds then.
"""

import torch
import transfer_queue as tq

from rl_accel.post_import import when_imported


def _save_after_validations(module):
    def on_validate_end(self):
        tags = (tq.kv_list("train") or {}).get("train", {}).values()
        submitted = sum(tag.get("is_prompt", False) for tag in tags)
        torch.save((self.train_dataloader.state_dict(), submitted), f"between_{self.global_steps}.pt")

    module.PPOTrainer.on_validate_end = on_validate_end


when_imported("verl.trainer.ppo.v1.trainer_base", _save_after_validations)
