"""Advantage actor-critic on a batch of simulated worlds: worlds, returns and advantages never leave the device, and the
scores of an update are read when the next has been launched.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DEVICE = "cuda"
WORLDS, SIZE, LENGTH, UPDATES = 8, 7, 10, 5
GAMMA, LAMBDA, ENTROPY = 0.95, 0.9, 0.01


class Walk:
    """Many walks along a line at once. A walk is rewarded at the right end, and begins again at either."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.at = torch.full((WORLDS,), SIZE // 2, device=DEVICE)

    def observe(self) -> Tensor:
        return nn.functional.one_hot(self.at, SIZE).float()

    def step(self, right: Tensor) -> tuple[Tensor, Tensor]:
        self.at = self.at + torch.where(right, 1, -1)
        reward = (self.at == SIZE - 1).float()
        done = (self.at <= 0) | (self.at >= SIZE - 1)
        self.at = torch.where(done, SIZE // 2, self.at)
        return reward, done


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIZE, 16, device=DEVICE), nn.Tanh())
        self.actor = nn.Linear(16, 2, device=DEVICE)
        self.critic = nn.Linear(16, 1, device=DEVICE)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def advantages(rewards: Tensor, values: Tensor, done: Tensor, last: Tensor) -> Tensor:
    """Return generalised advantages [LENGTH, WORLDS], from the end to the start."""
    result, running, following = torch.empty_like(rewards), torch.zeros_like(last), last
    for t in reversed(range(LENGTH)):
        alive = (~done[t]).float()
        delta = rewards[t] + GAMMA * following * alive - values[t]
        running = delta + GAMMA * LAMBDA * alive * running
        result[t] = running
        following = values[t]
    return result


def collect(agent: Agent, world: Walk) -> tuple[Tensor, ...]:
    seen, actions, rewards, ends, values = [], [], [], [], []
    with torch.no_grad():
        for _ in range(LENGTH):
            now = world.observe()
            logits, value = agent(now)
            noise = torch.rand(logits.shape, generator=world.generator, device=DEVICE).clamp_(min=1e-6)
            action = (logits - (-noise.log()).log()).argmax(-1)
            reward, done = world.step(action.bool())
            seen.append(now)
            actions.append(action)
            rewards.append(reward)
            ends.append(done)
            values.append(value)
        last = agent(world.observe())[1]
    return *(torch.stack(one) for one in (seen, actions, rewards, ends, values)), last


def main() -> None:
    torch.manual_seed(0)
    agent = Agent()
    world = Walk(torch.Generator(DEVICE).manual_seed(1))
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-2)
    home = torch.zeros(UPDATES, pin_memory=True)
    arrived = [torch.cuda.Event() for _ in range(UPDATES)]
    scores: list[float] = []
    for update in range(UPDATES):
        seen, actions, rewards, done, values, last = collect(agent, world)
        gain = advantages(rewards, values, done, last)
        target = gain + values
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        logits, value = agent(seen)
        chances = logits.log_softmax(-1)
        chosen = chances.gather(-1, actions[..., None]).squeeze(-1)
        entropy = -(chances.exp() * chances).sum(-1).mean()
        loss = -(gain * chosen).mean() + 0.5 * (value - target).square().mean() - ENTROPY * entropy
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        home[update].copy_(rewards.sum(), non_blocking=True)
        arrived[update].record()
        if update:
            arrived[update - 1].synchronize()  # san: ok(of the update before, whose work is done)
            scores.append(home[update - 1].item())
    arrived[-1].synchronize()  # san: ok(the end)
    scores.append(home[-1].item())
    print("rewards", scores)


main()
