"""Multi-agent GRPO in one file: two agents, one small transformer, one LoRA adapter for each agent.

A *Reasoner* reads a sum such as `47+85=` and writes notes: the tens column's sum, the units column's sum,
the carry. An *Actor* never sees the sum: it reads the notes and writes the answer. Neither can succeed alone,
and both get the same reward: 1 if the Actor's answer is correct. The steps, from top to bottom:

1. a Qwen3 of 0.8 M parameters is created from a seed; its tokens are characters;
2. it is warmed up on scripted demonstrations, most of which *forget the carry*: RL needs a partial skill;
3. the base is frozen, each agent gets its own LoRA adapter, and both learn only from the team's reward.

No line of code mentions the carry to the agents. It takes two minutes on one CPU core and needs only torch and
transformers: `python examples/one_file_grpo.py` (`--fast` runs a few steps, to check that it works).

Shapes: E episodes, N rows (each one turn of one agent), T positions, K completion positions, P tasks, G samples
per task, A agents, V vocabulary, I/R/O a layer's input, rank, output. GRPO: arXiv 2402.03300, equation 3.
"""

import random
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

REASONER, ACTOR = 0, 1
ALPHABET = "_0123456789+= .RA"  # one token per character; `_` is padding and `.` ends a turn
PAD, END = ALPHABET.index("_"), ALPHABET.index(".")
LONGEST_PROMPT, LONGEST_TURN = 9, 8  # tokens: "A12 15 1." and "12 15 1."

Problem = tuple[int, int]


# ------------------------------------------------------------------------------------------------ the task
def split_problems(held_out: int) -> tuple[list[Problem], list[Problem]]:
    """Return (train, test); 47+85 and 85+47 are in the same split, because otherwise half of the test would be known."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(0).shuffle(pairs)
    return [p for a, b in pairs[held_out:] for p in ((a, b), (b, a))], pairs[:held_out]


def demonstrations(problem: Problem) -> list[tuple[str, str]]:
    """Return (prompt, completion) of both roles; in six of ten problems with a carry, the carry is forgotten.

    RL may fix this in either agent: the Reasoner can note the carry, or the Actor can read the units.
    """
    a, b = problem
    tens, units = a // 10 + b // 10, a % 10 + b % 10
    carry = 0 if random.Random(100 * a + b).random() < 0.6 else units // 10  # fixed, without a pattern
    notes = f"{tens} {units} {carry}."
    return [(f"R{a}+{b}=", notes), (f"A{notes}", f"{10 * (tens + carry) + units % 10}.")]


# ------------------------------------------------------------------------------------------------ the team
class LoraLinear(nn.Module):
    """A frozen linear layer plus, in each row, the low-rank update of the agent that acts in this row."""

    def __init__(self, base: nn.Linear, agents: int, rank: int, speaker: dict[str, Tensor]) -> None:
        super().__init__()
        self.base, self.speaker = base, speaker
        # `up` starts at zero, so that before its first step every agent equals the base model. There is one tensor per
        # agent, because an optimiser updates whole tensors: in a joint tensor, agents would share its momentum.
        self.down = nn.ParameterList(torch.randn(base.in_features, rank) / rank for _ in range(agents))
        self.up = nn.ParameterList(torch.zeros(rank, base.out_features) for _ in range(agents))

    def forward(self, x_NTI: Tensor) -> Tensor:
        # All adapters side by side form one wide adapter, and each row keeps only its agent's columns. So rows
        # of all agents share a forward pass, and a team costs hardly more than one agent.
        own_NA = functional.one_hot(self.speaker["agent_N"], len(self.down))
        own_N1R = own_NA.repeat_interleave(self.down[0].shape[1], dim=1)[:, None]
        inner_NTR = x_NTI @ torch.cat(list(self.down), dim=1) * own_N1R
        output_NTO: Tensor = self.base(x_NTI) + inner_NTR @ torch.cat(list(self.up), dim=0)
        return output_NTO


class Team:
    """One base model and, after `add_adapters`, one set of trained weights for each agent."""

    def __init__(self) -> None:
        config = Qwen3Config(
            vocab_size=len(ALPHABET),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        )
        self.model = Qwen3ForCausalLM(config)
        self.speaker: dict[str, Tensor] = {}  # which agent acts in which row of the current forward pass

    def add_adapters(self, agents: int, rank: int) -> list[list[nn.Parameter]]:
        """Freeze the base, wrap its linear layers, and return each agent's parameters."""
        self.model.requires_grad_(requires_grad=False)
        layers: list[LoraLinear] = []
        for parent, name in [(m, name) for m in self.model.model.modules() for name, _ in m.named_children()]:
            child = parent.get_submodule(name)
            if isinstance(child, nn.Linear):
                layers.append(LoraLinear(child, agents, rank, self.speaker))
                setattr(parent, name, layers[-1])
        return [[w for layer in layers for w in (layer.down[i], layer.up[i])] for i in range(agents)]

    def logp(self, agent_N: Tensor, ids_NT: Tensor, seen_NT: Tensor, cache: DynamicCache | None) -> Tensor:
        """Return log-probabilities (N, positions of `ids_NT`, V) of the token after each position."""
        self.speaker["agent_N"] = agent_N
        # `seen_NT` marks tokens that are not padding, including the cache. Positions need no correction for the padding
        # on the left, because rotary embeddings depend only on distances.
        inputs = {"input_ids": ids_NT, "attention_mask": seen_NT, "past_key_values": cache}
        logits_NTV = self.model(**inputs, use_cache=cache is not None).logits
        logits_NTV[:, :, PAD] = -1e9  # padding is never sampled
        return functional.log_softmax(logits_NTV, dim=-1)


# ------------------------------------------------------------------------------------------------- playing
class Turns(NamedTuple):
    """Prompts and completions in tokens: the learner must use exactly the tokens that the sampler drew."""

    agent_N: Tensor
    prompt_NT: Tensor  # padded on the left, so that every completion starts in the same column
    completion_NK: Tensor  # padded on the right
    logp_NK: Tensor  # under the weights that sampled, in nats


def encode(texts: list[str], width: int, *, left: bool) -> Tensor:
    padded = [text.rjust(width, "_") if left else text.ljust(width, "_") for text in texts]
    return torch.tensor([[ALPHABET.index(character) for character in text] for text in padded])


def decode(ids_NT: Tensor) -> list[str]:
    return ["".join(ALPHABET[i] for i in row if i != PAD) for row in ids_NT.tolist()]


@torch.no_grad()
def sample(team: Team, agent: int, prompts: list[str], *, greedy: bool) -> Turns:
    """Let one agent answer all prompts at once; with the KV cache, each token costs one position."""
    agent_N, prompt_NT = torch.full((len(prompts),), agent), encode(prompts, LONGEST_PROMPT, left=True)
    completion_NK = torch.full((len(prompts), LONGEST_TURN), PAD)
    logp_NK = torch.zeros(completion_NK.shape)
    ids_NT, seen_NT, cache = prompt_NT, (prompt_NT != PAD).long(), DynamicCache(config=team.model.config)
    ended_N1 = torch.zeros(len(prompts), 1, dtype=torch.bool)
    for k in range(LONGEST_TURN):
        logp_NV = team.logp(agent_N, ids_NT, seen_NT, cache)[:, -1]
        token_N1 = logp_NV.argmax(1, keepdim=True) if greedy else torch.multinomial(logp_NV.exp(), 1)
        completion_NK[:, k : k + 1] = ids_NT = token_N1.masked_fill(ended_N1, PAD)
        logp_NK[:, k : k + 1] = logp_NV.gather(1, token_N1)
        seen_NT = torch.cat([seen_NT, torch.ones_like(ids_NT)], dim=1)
        ended_N1 |= ids_NT == END
        if ended_N1.all():
            break
    return Turns(agent_N, prompt_NT, completion_NK, logp_NK)


def play(team: Team, problems: list[Problem], *, greedy: bool) -> tuple[Turns, Tensor]:
    """Roll out one episode per problem; return all Reasoner rows, then all Actor rows, and the team's rewards."""
    reasoner = sample(team, REASONER, [f"R{a}+{b}=" for a, b in problems], greedy=greedy)
    actor = sample(team, ACTOR, [f"A{note}" for note in decode(reasoner.completion_NK)], greedy=greedy)
    answers = zip(decode(actor.completion_NK), problems, strict=True)
    reward_E = torch.tensor([float(answer == f"{a + b}.") for answer, (a, b) in answers])
    return Turns(*(torch.cat(both) for both in zip(reasoner, actor, strict=True))), reward_E


# ------------------------------------------------------------------------------------------------ learning
def completion_logp(team: Team, agent_N: Tensor, prompt_NT: Tensor, completion_NK: Tensor) -> Tensor:
    """Return the log-probability (N, K) of each completion token under the current weights."""
    ids_NT = torch.cat([prompt_NT, completion_NK], dim=1)[:, :-1]
    start = prompt_NT.shape[1] - 1  # the last prompt token predicts the first completion token
    logp_NKV = team.logp(agent_N, ids_NT, (ids_NT != PAD).long(), None)[:, start:]
    return logp_NKV.gather(2, completion_NK[:, :, None]).squeeze(2)


def warm_up(team: Team, train: list[Problem], steps: int) -> None:
    """Train the base itself on the completions (SFT), which contain the format and the mistake."""
    optimiser = torch.optim.AdamW(team.model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.05)
    rng = random.Random(1)
    for _ in range(steps):
        shown = [turn for problem in rng.sample(train, 24) for turn in demonstrations(problem)]
        prompt_NT = encode([prompt for prompt, _ in shown], LONGEST_PROMPT, left=True)
        completion_NK = encode([completion for _, completion in shown], LONGEST_TURN, left=False)
        logp_NK = completion_logp(team, torch.empty(0), prompt_NT, completion_NK)  # no adapters, so no agent
        (-logp_NK[completion_NK != PAD].mean()).backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()


def group_advantage(reward_PG: Tensor) -> Tensor:
    """Compare each sample with the others of its task; a task that all samples solve, or none, gives no gradient."""
    return (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-6)


def clipped_loss(logp_NK: Tensor, turns: Turns, advantage_N: Tensor, clip: float = 0.2) -> Tensor:
    """Return minus the clipped surrogate, averaged over each agent's tokens and summed over agents.

    The mean is per agent, so that an agent with long completions does not dominate the gradient.
    """
    ratio_NK, advantage_N1 = (logp_NK - turns.logp_NK).exp(), advantage_N[:, None]
    gain_NK = torch.minimum(ratio_NK * advantage_N1, ratio_NK.clamp(1 - clip, 1 + clip) * advantage_N1)
    said_NK, agent_N1 = turns.completion_NK != PAD, turns.agent_N[:, None]
    return -torch.stack([gain_NK[said_NK & (agent_N1 == i)].mean() for i in (REASONER, ACTOR)]).sum()


def reinforce(team: Team, train: list[Problem], steps: int, tasks: int, samples: int) -> None:
    """Multi-agent GRPO: roll out, compare within each task's group, and update both agents' adapters."""
    adapters = team.add_adapters(agents=2, rank=16)
    optimisers = [torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0) for weights in adapters]
    rng = random.Random(2)
    for step in range(steps):
        problems = [problem for problem in rng.sample(train, tasks) for _ in range(samples)]
        turns, reward_E = play(team, problems, greedy=False)
        # Each agent's turns are compared with its own turns in the group; their return is the team's reward.
        advantage_N = group_advantage(reward_E.view(tasks, samples)).flatten().repeat(2)
        # Two optimiser steps per rollout, with half of the tasks each. At the second step, the weights differ from
        # those that sampled: the ratio corrects for this, and the clip bounds the size of a step.
        first_N = torch.arange(2 * len(problems)) % len(problems) < len(problems) // 2
        for half_N in (first_N, ~first_N):
            part = Turns(*(field[half_N] for field in turns))
            logp_NK = completion_logp(team, *part[:3])  # one forward pass for the whole team
            clipped_loss(logp_NK, part, advantage_N[half_N]).backward()
            for weights, optimiser in zip(adapters, optimisers, strict=True):
                nn.utils.clip_grad_norm_(weights, 1.0)  # per agent, like all trained weights
                optimiser.step()
                optimiser.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"  step {step:2d}: team reward {reward_E.mean():.2f}")


def report(team: Team, test: list[Problem], when: str) -> None:
    turns, reward_E = play(team, test, greedy=True)
    row = next(i for i, (a, b) in enumerate(test) if a % 10 + b % 10 > 9)  # a problem with a carry
    notes, answer = decode(turns.completion_NK[[row, row + len(test)]])
    print(f"{when}: {reward_E.mean():.1%} of {len(test)} unseen problems right (greedy)")
    print(f"  {test[row][0]}+{test[row][1]} -> Reasoner: {notes!r} -> Actor: {answer!r}")


def main(*, fast: bool) -> None:
    torch.set_num_threads(
        1
    )  # more threads do not speed up such small matrices, and one thread is bitwise reproducible
    torch.manual_seed(0)
    team, started = Team(), time.monotonic()
    train, test = split_problems(held_out=20 if fast else 500)
    warm_up(team, train, steps=4 if fast else 600)
    report(team, test, f"before, {time.monotonic() - started:.0f} s")
    reinforce(team, train, steps=2 if fast else 40, tasks=4 if fast else 32, samples=8)
    report(team, test, f"after, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(fast="--fast" in sys.argv[1:])
