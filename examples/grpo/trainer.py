"""The trainer's rank: holds the policy (sharded by FSDP2 where there are several ranks) and takes GRPO steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from examples.grpo.digests import digests
from examples.grpo.grpo import advantages, completed, policy_loss
from examples.grpo.model import make_model, make_tokens
from examples.grpo.packing import completion_logits
from examples.grpo.rollout import Group
from examples.grpo.settings import Settings
from mx_rl.ray import Trainer


class GrpoTrainer(Trainer):
    def __init__(self, *, settings: Settings) -> None:
        self.settings = settings

    def build(self) -> nn.Module:
        torch.set_num_threads(self.settings.trainer_threads)
        torch.manual_seed(self.settings.seed)
        self.tokens = make_tokens(self.settings)
        self.model = make_model(self.settings, dtype=torch.float32, weights=True)
        if self.world_size > 1:
            _shard(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.settings.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )
        # Full speed for two thirds, then down to nothing: at full speed the policy goes on jumping about its optimum.
        last = self.settings.steps / 3
        self.schedule = LambdaLR(self.optimizer, lambda step: min(1.0, (self.settings.steps - step) / last))
        return self.model

    def train_step(self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
        """One optimizer step on all groups, of which this rank computes its share."""
        mine = slice(self.rank, None, self.world_size)
        shares = list(groups[mine])
        prompts = self.tokens.encode([group.prompt.text for group in shares])
        tokens = torch.tensor([group.tokens for group in shares])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings.autocast):
            logits = completion_logits(self.model, prompts, tokens)
        loss = policy_loss(
            logits.float() / self.settings.temperature,
            tokens,
            torch.tensor([group.logprobs for group in shares]),
            advantages(torch.tensor([list(row) for row in rewards[mine]])),
            completed(tokens, self.tokens.end),
            self.settings.clip,
        )
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item(), "grad_norm": float(norm.full_tensor() if self.world_size > 1 else norm)}

    def digests(self) -> dict[str, str]:
        """Of the weights as they are published: in bfloat16."""
        return digests(self.model.state_dict(), torch.bfloat16)


def _shard(model: nn.Module) -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
