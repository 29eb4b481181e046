"""A toy RL loop on Ray: one trainer, two rollouts, and the way of the weights between them."""

import hashlib
import time

import ray
import torch

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

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights)

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
    for step in range(STEPS + 1):
        begun = time.perf_counter()
        weights = ray.put(ray.get(trainer.weights.remote()))
        ray.get([rollout.load.remote(weights) for rollout in rollouts])
        shipped = time.perf_counter() - begun
        batches = ray.get([rollout.generate.remote(256) for rollout in rollouts])
        reward = torch.cat([rewards for _, _, rewards in batches]).mean()
        print(f"step {step}: reward {reward:.2f}, weights shipped in {1e3 * shipped:.0f} ms")
        if step < STEPS:  # the last round only shows what was learnt
            ray.get(trainer.step.remote(batches))
    digests = ray.get([actor.digest.remote() for actor in [trainer, *rollouts]])
    print("the rollouts' weights are the trainer's:", len(set(digests)) == 1)


if __name__ == "__main__":
    main()
