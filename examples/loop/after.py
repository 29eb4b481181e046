"""A toy RL loop on Ray: one trainer, two rollouts, and the way of the weights between them."""

import hashlib
import time

import ray
import torch

from mx_rl.ray import RolloutFleet, TrainerGroup

STATES, ACTIONS, STEPS = 16, 4, 30

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(STATES, 64), torch.nn.Tanh(), torch.nn.Linear(64, ACTIONS))


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()


@ray.remote
class Trainer:
    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def step(self, batches: list[Batch]) -> None:
        """One step of REINFORCE."""
        states, actions, rewards = (torch.cat(parts) for parts in zip(*batches, strict=True))
        chosen = torch.distributions.Categorical(logits=self.model(states)).log_prob(actions)
        self.optimizer.zero_grad()
        (-chosen * (rewards - rewards.mean())).mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        return digest(self.model)


@ray.remote
class Rollout:
    def __init__(self) -> None:
        self.model = make_model()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    @torch.no_grad()
    def generate(self, number: int) -> Batch:
        """Act in ``number`` random states; 1 is the reward of the one right action, 0 of the others."""
        which = torch.randint(STATES, (number,))
        states = torch.nn.functional.one_hot(which, STATES).float()
        actions = torch.distributions.Categorical(logits=self.model(states)).sample()
        return states, actions, (actions == which % ACTIONS).float()

    def digest(self) -> str:
        return digest(self.model)


def main() -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    trainer = Trainer.remote()
    rollouts = [Rollout.remote() for _ in range(2)]
    group = TrainerGroup.from_actors([trainer], policy="toy", build="weights")
    fleet = RolloutFleet.from_actors(rollouts, policy="toy", build="weights")
    for step in range(STEPS + 1):
        begun = time.perf_counter()
        fleet.sync(at_least=group.publish(step=step))
        shipped = time.perf_counter() - begun
        batches = fleet.map("generate", [256] * len(rollouts))
        reward = torch.cat([rewards for _, _, rewards in batches]).mean()
        print(f"step {step}: reward {reward:.2f}, weights shipped in {1e3 * shipped:.0f} ms")
        if step < STEPS:  # the last round only shows what was learnt
            ray.get(trainer.step.remote(batches))
    digests = ray.get([actor.digest.remote() for actor in [trainer, *rollouts]])
    print("the rollouts' weights are the trainer's:", len(set(digests)) == 1)


if __name__ == "__main__":
    main()
