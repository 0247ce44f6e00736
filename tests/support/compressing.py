"""What several processes run to try DeepGradientCompression; they give what they find to ``said``."""

from __future__ import annotations

COMMON = """
import copy, logging
from torch import nn
import graphopt
from graphopt import GraphoptError
from graphopt.rewriting.distributed import sparse_update
from graphopt.runtime.state_dict import plain_state
from graphopt.ir.ops.selection import select
from graphopt.passes import DataParallel, DeepGradientCompression, FuseUpdate, MixedPrecision, Recompute, ScaleLoss

NAME = "deep-gradient-compression"
RAMP = dict(sparsity=(0.9, 0.98), rampup_begin_step=1, rampup_step=4, min_elements=500)
F64 = torch.float64

class Net(nn.Module):
    def __init__(self, tied=False, bias=True):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=bias), nn.Linear(32, 32, bias=False)
        self.last = nn.Linear(32, 4, bias=bias)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))

def build(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Net(**options).to(dtype)

def loss(model, x, y, poison=None):
    value = nn.functional.cross_entropy(model(x), y)
    return value if poison is None else value + (poison * model.second.weight).sum()  # one gradient is not finite

def batch(number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(8, 32, generator=generator).to(dtype), torch.randint(4, (8,), generator=generator)

def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, foreach=True, **options)

def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)

def made(model, optimizer, *passes):
    exchange = DataParallel(bucket_mb=0.005, first_bucket_mb=0)
    return graphopt.optimize_step(model, optimizer, [exchange, *passes], loss=loss)

def flat(model):
    return torch.cat([tensor.detach().flatten() for tensor in model.parameters()])

def gathered(tensor):
    found = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(found, tensor.contiguous())
    return found

def same_on_all(model):
    own = flat(model)
    return bool(own.isfinite().all()) and all(torch.equal(own, other) for other in gathered(own))

def held(step, what):
    found = plain_state(step.state_dict())["held"]
    return {name: tensor for name, tensor in found.items() if f"{NAME}/{what}" in name}

said = {}
few = world > 2
less = False  # the first case of each kind only
PICKED = ()  # of the ways below; all where there is none
"""

# What is trained in which way, and whether parameters are equal on all ranks after every step.
EQUAL = """
def dgc(**options):
    return DeepGradientCompression(**{**RAMP, **options})

WAYS = {
    "plain": lambda: (build(), sgd, [dgc()], 1),
    "nesterov, clipping, decay": lambda: (build(), sgd, [dgc(nesterov=True, clip_norm=0.1, weight_decay=0.01)], 1),
    "no masking, bfloat16 wire": lambda: (build(), sgd, [dgc(masking=False, wire="bfloat16")], 1),
    "feedback, float16 wire": lambda: (build(), adamw, [dgc(correction="feedback", wire="float16")], 1),
    "bfloat16, O2": lambda: (build(), sgd, [dgc(), MixedPrecision(level="O2")], 1),
    "bfloat16, O1": lambda: (build(), sgd, [dgc(), MixedPrecision()], 1),
    "float16": lambda: (build(), sgd, [dgc(clip_norm=1.0), MixedPrecision("float16")], 1),
    "accumulated": lambda: (build(), sgd, [dgc()], 3),
    "tied": lambda: (build(tied=True), sgd, [dgc()], 1),
    "with other passes": lambda: (build(), sgd, [dgc(), FuseUpdate(), Recompute(("first", "second"))], 1),
    "bfloat16 parameters": lambda: (build(torch.bfloat16), sgd, [dgc()], 1),
}

def train(name):
    model, optimizer, passes, every = WAYS[name]()
    before, dtype = flat(model).clone(), next(model.parameters()).dtype
    step = made(model, optimizer(model), *passes).accumulate(every)
    same = []
    for number in range(6 * every):
        step(*batch(number, dtype))
        same.append(same_on_all(model))
    calls = [str(node.target) for node in step.program.graph.nodes]
    return flat(model), same, not torch.equal(before, flat(model)), calls

trained = {}
for name in list(WAYS)[:4] if few else PICKED or WAYS:
    trained[name], same, moved, calls = train(name)
    said[name] = [same, moved, sum("all_gather" in call for call in calls)]
# the same, with updates of the entries that arrive where the optimizer is SGD: equal on all ranks, as with dense sums
sparse_update.FEWEST = 2
ENTRIES = ("plain",) if few else ("plain", "nesterov, clipping, decay", "bfloat16, O2", "float16", "accumulated")
for name in [name for name in ENTRIES if name in (PICKED or WAYS)]:
    found, same, _, calls = train(name)
    off = (found - trained[name]).abs().max().item()
    said[name + ", entries"] = [same, any("sum_entries" in call for call in calls), off]
sparse_update.FEWEST = 64
said["other passes change nothing"] = few or torch.equal(trained["plain"], trained["with other passes"])
"""

DENSE = """
# before the first sparsity, parameters are those of SGD with momentum, to the last bit
for name, options in {
    "momentum": dict(momentum=0.9),
    "nesterov": dict(momentum=0.8, weight_decay=0.01, nesterov=True),
}.items() if not few else ():
    if less and name != "momentum":
        continue
    whole, half = build(), build()
    theirs = sgd(whole, **options)
    plain = made(whole, theirs)
    late = {**RAMP, "rampup_begin_step": 6, "masking": False}
    ours = made(half, sgd(half), DeepGradientCompression(**options, **late))
    zero = build()
    never = made(zero, sgd(zero), DeepGradientCompression(sparsity=(0.0,), **options))
    equal = []
    for number in range(6):
        for step in (plain, ours, never):
            step(*batch(number))
        equal.append(torch.equal(flat(whole), flat(half)) and torch.equal(flat(whole), flat(zero)))
    scale = options["momentum"] if "nesterov" in options else 1.0
    buffers = {key: theirs.state[p]["momentum_buffer"] * scale for key, p in whole.named_parameters()}
    momenta = {key.rsplit("/", 1)[1]: u for key, u in held(ours, "momentum").items()}
    carried = all(torch.equal(momenta[key], buffers[key].flatten()) for key in buffers)
    # the first sparse step goes on from that momentum
    gradient = torch.autograd.grad(loss(half, *batch(6)), half.second.weight)[0].flatten()
    gradient = gradient.add(half.second.weight.detach().flatten(), alpha=options.get("weight_decay", 0.0))
    before = momenta["second.weight"]
    ours(*batch(6))
    after = held(ours, "momentum/second.weight").popitem()[1]
    expected = (before + gradient) * scale if "nesterov" in options else before * options["momentum"] + gradient
    said["dense, " + name] = [equal, carried, (after - expected).abs().max().item()]
"""

# Against a plain implementation of the published algorithm, all ranks at once, in float64; and what is conserved.
EXACT = """
LR = 0.1

class Published:
    \"\"\"All ranks of the published algorithm, each tensor densely stored; the batch of every rank is known here.\"\"\"

    def __init__(self, model, options):
        self.model, self.o = model, dict(momentum=0.9, nesterov=False, masking=True, weight_decay=0.0, clip_norm=None)
        self.o.update(options)
        zeros = lambda: {name: torch.zeros(p.numel(), dtype=F64) for name, p in model.named_parameters()}
        self.u, self.v = [zeros() for _ in range(world)], [zeros() for _ in range(world)]
        self.added = [zeros() for _ in range(world)]

    def gradients(self, number):
        global rank
        own, found = rank, []
        for other in range(world):
            rank = other
            found.append(torch.autograd.grad(loss(self.model, *batch(number, F64)), list(self.model.parameters())))
        rank = own
        return found

    def step(self, number, sparsity):
        o, m = self.o, self.o["momentum"]
        for name, parts in zip(dict(self.model.named_parameters()), zip(*self.gradients(number))):
            p = self.model.get_parameter(name)
            decay = o["weight_decay"] * p.detach().flatten()
            if not sparsity or p.numel() < RAMP["min_elements"]:
                g = sum(part.flatten() for part in parts) / world + decay
                for u in self.u:
                    u[name] = m * (u[name] + g) if o["nesterov"] else m * u[name] + g
                change = g + self.u[0][name] if o["nesterov"] else self.u[0][name]
            else:
                total = torch.zeros(p.numel(), dtype=F64)
                for u, v, added, part in zip(self.u, self.v, self.added, parts):
                    g = part.flatten()
                    if o["clip_norm"] is not None:
                        g = g * min(1.0, o["clip_norm"] * world**-0.5 / (g.norm().item() + 1e-6))
                    g = g + decay
                    u[name] = m * (u[name] + g) if o["nesterov"] else m * u[name] + g
                    more = u[name] + g if o["nesterov"] else u[name]
                    v[name] = v[name] + more
                    added[name] += more
                    k = max(1, int(p.numel() * (1 - sparsity) + 1e-6))
                    sent = torch.tensor(sorted(range(p.numel()), key=lambda i: -abs(v[name][i].item()))[:k])
                    total[sent] += v[name][sent]
                    v[name][sent] = 0.0
                    if o["masking"]:
                        u[name][sent] = 0.0
                change = total / world
            with torch.no_grad():
                p.sub_(LR * change.view_as(p))

def run(model, steps, *passes, lr=LR, optimizer=sgd):
    step = made(model, optimizer(model, lr=lr), *passes)
    for number in range(steps):
        step(*batch(number, F64))
    return step

def error(one, other):
    return (flat(one) - flat(other)).abs().max().item()

CASES = {
    "masking": dict(clip_norm=0.3, weight_decay=0.01), "no masking": dict(masking=False, nesterov=True),
}
for name, options in list(CASES.items())[: 1 if few or less else None]:
    ours, theirs = build(F64), build(F64)
    step = run(ours, 12, DeepGradientCompression(**options, **RAMP))
    reference = Published(theirs, options)
    for number in range(12):
        reference.step(number, 0.0 if number < 1 else 0.9 if number < 3 else 0.98)
    v = held(step, "residual/first.weight").popitem()[1]
    said["published, " + name] = [error(ours, theirs), (v - reference.v[rank]["first.weight"]).abs().max().item()]
    sparse_update.FEWEST, entries = 2, build(F64)
    step = run(entries, 12, DeepGradientCompression(**options, **RAMP))
    v = held(step, "residual/first.weight").popitem()[1]
    assert any("sum_entries" in str(node.target) for node in step.program.graph.nodes)
    sparse_update.FEWEST = 64
    said["published, entries, " + name] = [
        error(entries, theirs), (v - reference.v[rank]["first.weight"]).abs().max().item()
    ]

# what is added to the residuals is sent or kept: a rank's velocities against parameters and residuals
for name, options in {
    "momentum": dict(masking=False), "nesterov, float16 wire": dict(masking=False, nesterov=True, wire="float16"),
    "feedback, bfloat16 wire": dict(correction="feedback", wire="bfloat16"),
}.items() if not few else ():
    if less and name != "momentum":
        continue
    model = build(F64)
    always = dict(sparsity=(0.9,), rampup_step=1, min_elements=1)
    step = made(model, sgd(model, lr=LR), DeepGradientCompression(**always, **options))
    weights = ("first.weight", "second.weight", "last.weight")
    u, added = [torch.zeros(3, 1024, dtype=F64) for _ in range(2)]
    for number in range(20):
        found = torch.autograd.grad(loss(model, *batch(number, F64)), [model.get_parameter(w) for w in weights])
        g = torch.stack([nn.functional.pad(part.flatten(), (0, 1024 - part.numel())) for part in found])
        if "correction" in options:
            added += g
        elif "nesterov" in options:
            u = (u + g) * 0.9
            added += u + g
        else:
            u = u * 0.9 + g
            added += u
        step(*batch(number, F64))
    residuals = held(step, "residual")
    worst = 0.0
    for row, weight in zip(added, weights):
        total = sum(gathered(row))
        v = residuals[f"{NAME}/residual/{weight}"]
        first = build(F64).get_parameter(weight).detach()
        sent = (first - model.get_parameter(weight).detach()).flatten() * world / LR
        kept = sum(gathered(v))
        worst = max(worst, (total[: v.numel()] - sent - kept).abs().max().item(), 0.0 if kept.any() else 1.0)
    said["conserved, " + name] = worst

# everything sent: without masking momentum SGD, with it plain SGD
DeepGradientCompression._reason = lambda self, gradient, sparsity, ranks, speeds: ""
ALL = dict(sparsity=(1e-12,), rampup_step=1, min_elements=1)
for name, options, dense in (
    ("no masking", dict(masking=False, nesterov=True), dict(momentum=0.9, nesterov=True)),
    ("masking", {}, {}),
) if not few else ():
    if less and name != "no masking":
        continue
    ours, theirs = build(F64), build(F64)
    run(ours, 20, DeepGradientCompression(**ALL, **options))
    run(theirs, 20, optimizer=lambda model, lr: sgd(model, lr=lr, **dense))
    said["density 1, " + name] = error(ours, theirs)
"""

SKIPPED = """
# one rank's gradient is not finite
def poisoned(*passes, at=4, mine=False):
    model = build()
    step = made(model, sgd(model), *passes)
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("graphopt").addHandler(handler)
    found = {}
    for number in range(7):
        poison = torch.tensor(float("inf") if number == at and rank == 1 else 0.0)
        before = (flat(model).clone(), held(step, "") if number else {})
        step(*batch(number), poison)
        if number == at:
            found["before"], found["after"] = before, (flat(model).clone(), held(step, ""))
            found["scale"] = {k: v.item() for k, v in step.state_dict()["held"].items() if "loss-scale" in k}
    logging.getLogger("graphopt").removeHandler(handler)
    return found, [line for line in warnings if "not finite" in line], same_on_all(model)

options = {**RAMP, "rampup_step": 8}
for name, passes in {
    "float16": [MixedPrecision("float16", init_scale=1024.0)],
    "float32, checked": [ScaleLoss(init_scale=1.0, dynamic=False)],
}.items() if not few else ():
    if less and name != "float16":
        continue
    found, warned, same = poisoned(DeepGradientCompression(**options), *passes)
    kept = all(torch.equal(found["after"][1][key], value) for key, value in found["before"][1].items())
    nothing = torch.equal(found["before"][0], found["after"][0])
    moving = all(value.any() for key, value in found["before"][1].items() if "residual" in key)
    said["skipped, " + name] = [kept and len(found["before"][1]) > 3, nothing, moving, same, found["scale"], warned]

found, warned, same = poisoned(DeepGradientCompression(**options))
key = f"{NAME}/residual/second.weight"
old_u, old_v = (found["before"][1][key.replace("residual", what)] for what in ("momentum", "residual"))
new_u, new_v = (found["after"][1][key.replace("residual", what)] for what in ("momentum", "residual"))
indices = select(old_v, 102)[0].long()
masked_u, rest_v = old_u.clone(), old_v.clone()
masked_u[indices], rest_v[indices] = 0.0, 0.0
said["left out"] = [torch.equal(new_u, masked_u), torch.equal(new_v, rest_v), same, warned]
"""

RESUME = """
# saved in the middle of the warm-up
KINDS = {
    "momentum": (sgd, dict(nesterov=True, clip_norm=0.5)),
    "feedback": (adamw, dict(correction="feedback", wire="bfloat16")),
}

def place(kind):
    return os.path.join(os.path.dirname(store), f"{kind}-{rank}.pt")

def start(kind):
    optimizer, options = KINDS[kind]
    model = build()
    made_of = optimizer(model)
    return model, made_of, made(model, made_of, DeepGradientCompression(**{**RAMP, "rampup_step": 6}, **options))

def states(*owners):
    return [owner.state_dict() for owner in owners]
"""

SAVE = """
for kind in KINDS:
    owners = start(kind)
    for number in range(3):
        owners[2](*batch(number))
    torch.save(states(*owners), place(kind))
    for number in range(3, 9):
        owners[2](*batch(number))
    torch.save(states(*owners), place(kind + ", whole"))
"""

LOAD = """
def bits(states):
    plain = lambda value: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
    return torch.utils._pytree.tree_map(plain, states)

for kind in KINDS:
    owners = start(kind)
    for owner, state in zip(owners, torch.load(place(kind))):
        owner.load_state_dict(state)
    for number in range(3, 9):
        owners[2](*batch(number))
    said[kind] = bits(states(*owners)) == bits(torch.load(place(kind + ", whole")))
    said[kind + ", programs"] = list(owners[2].programs)
"""

# The momentum of the optimizer, taken over: against all ranks at once in float64, dense steps, changes, saved states.
TAKEN = """
LATE = dict(sparsity=(0.9, 0.98), rampup_begin_step=2, rampup_step=4, min_elements=500)
SOON = {**LATE, "rampup_begin_step": 0}

def momentum_sgd(model, **options):
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    plain = [p for name, p in model.named_parameters() if name.endswith("bias")]
    first = {"params": decayed, **options.pop("of_weights", {})}
    return torch.optim.SGD([first, {"params": plain}], lr=0.1, **options)

class Loop:
    \"\"\"Momentum correction and factor masking of all ranks in a plain loop; buffers are those of SGD.\"\"\"

    def __init__(self, model, optimizer, ramp, masking, clip_norm):
        self.model, self.ramp, self.masking, self.clip_norm = model, ramp, masking, clip_norm
        self.group = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.buffers, self.rests = [{} for _ in range(world)], [{} for _ in range(world)]

    def gradients(self, number):
        global rank
        own, found = rank, []
        for other in range(world):
            rank = other
            found.append(torch.autograd.grad(loss(self.model, *batch(number, F64)), list(self.model.parameters())))
        rank = own
        return list(zip(*found))

    def direction(self, group, buffers, name, g):
        if not group["momentum"]:
            return g
        if name not in buffers:
            buffers[name] = g.clone()
        else:
            buffers[name] = group["momentum"] * buffers[name] + (1 - group["dampening"]) * g
        return g + group["momentum"] * buffers[name] if group["nesterov"] else buffers[name]

    def sparse(self, group, name, p, parts, sparsity):
        total = torch.zeros_like(p)
        for buffers, rests, g in zip(self.buffers, self.rests, parts):
            if self.clip_norm is not None:
                g = g * min(1.0, self.clip_norm * world**-0.5 / (g.norm().item() + 1e-6))
            if group["momentum"]:
                g = g + group["weight_decay"] * p
            rest = rests.get(name, torch.zeros_like(p)) + self.direction(group, buffers, name, g)
            count = max(1, int(p.numel() * (1 - sparsity) + 1e-6))
            sent = rest.flatten().abs().topk(count).indices
            total.view(-1)[sent] += rest.view(-1)[sent]
            rest.view(-1)[sent] = 0.0
            if self.masking and group["momentum"]:
                buffers[name].view(-1)[sent] = 0.0
            rests[name] = rest
        return total / world if group["momentum"] else total / world + group["weight_decay"] * p

    @torch.no_grad()
    def step(self, number):
        sparsity = self.ramp.at(number)
        with torch.enable_grad():
            gradients = self.gradients(number)
        for (name, p), parts in zip(self.model.named_parameters(), gradients):
            group = self.group[id(p)]
            if sparsity and p.numel() >= 500:
                change = self.sparse(group, name, p, parts, sparsity)
            else:
                g = sum(parts) / world + group["weight_decay"] * p
                for buffers in self.buffers:
                    change = self.direction(group, buffers, name, g)
            p.sub_(group["lr"] * change)

CASES = {
    "weight decay, clipping": (dict(momentum=0.9, weight_decay=0.01), LATE, dict(clip_norm=0.3)),
    "nesterov": (dict(momentum=0.8, nesterov=True), SOON, {}),
    "dampening": (dict(momentum=0.9, dampening=0.5, weight_decay=0.01), SOON, dict(masking=False)),
    "weights alone": (dict(of_weights=dict(momentum=0.9, weight_decay=0.1)), LATE, {}),
    "biases alone": (dict(momentum=0.9, of_weights=dict(momentum=0.0, weight_decay=0.1)), SOON, {}),
}
for name, (settings, ramp, options) in CASES.items():
    for changed in (False, True) if not PICKED or name in PICKED else ():
        ours, theirs = build(F64), build(F64)
        optimizers = [momentum_sgd(model, **copy.deepcopy(settings)) for model in (ours, theirs)]
        current = DeepGradientCompression(**ramp, **options)
        step = made(ours, optimizers[0], current)
        loop = Loop(theirs, optimizers[1], current.rampup, current.masking, current.clip_norm)
        for number in range(8):
            if changed and number == 5:  # a schedule of the momentum
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    group["momentum"] *= 0.5
            step(*batch(number, F64))
            loop.step(number)
        buffers = {key: optimizers[0].state[p].get("momentum_buffer") for key, p in ours.named_parameters()}
        kept = loop.buffers[rank]
        assert set(kept) == {key for key, buffer in buffers.items() if buffer is not None}
        off = max([(flat(ours) - flat(theirs)).abs().max().item(),
                   *((buffers[key] - kept[key]).abs().max().item() for key in kept)])
        lines = [line for line in step.records[-1].changed.lines if "momentum" in line]
        said[name + (", changed" if changed else "")] = [off, same_on_all(ours), lines]

def fp32(*passes, **options):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    return model, optimizer, made(model, optimizer, *passes)

def bits(*owners):
    plain = lambda value: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
    return torch.utils._pytree.tree_map(plain, [owner.state_dict() for owner in owners])

# dense steps are those of the optimizer, and its buffers go on into sparse ones: by the pass, and by changing to it
whole, plain = fp32(DeepGradientCompression(**LATE)), fp32()
for number in range(2):
    whole[2](*batch(number)), plain[2](*batch(number))
said["dense"] = bits(*whole[:2]) == bits(*plain[:2])
switched = fp32(DeepGradientCompression(**SOON))
switched[0].load_state_dict(plain[0].state_dict())
switched[1].load_state_dict(plain[1].state_dict())
for number in range(2, 8):
    whole[2](*batch(number)), switched[2](*batch(number))
said["switched"] = bits(*whole[:2]) == bits(*switched[:2]) and same_on_all(whole[0])
back, eager = fp32(), fp32()
states = [[owner.state_dict() for owner in whole[:2]]]
dist.broadcast_object_list(states, 0)  # the state of one rank for all of them, since buffers differ
for other in (back, eager):  # and back to dense ones
    for owner, state in zip(other, states[0]):
        owner.load_state_dict(copy.deepcopy(state))
back[2](*batch(8))
eager[1].zero_grad()
loss(eager[0], *batch(8)).backward()
for p in eager[0].parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
eager[1].step()
said["back"] = [(flat(back[0]) - flat(eager[0])).abs().max().item(), same_on_all(back[0])]

# a run that is resumed in the warm-up, and one where the first steps are skipped
started, resumed = fp32(DeepGradientCompression(**SOON)), fp32(DeepGradientCompression(**SOON))
for number in range(3):
    started[2](*batch(number))
for old, new in zip(started, resumed):
    new.load_state_dict(copy.deepcopy(old.state_dict()))
for number in range(3, 8):
    started[2](*batch(number)), resumed[2](*batch(number))
said["resumed"] = bits(*started) == bits(*resumed)

skipping = fp32(DeepGradientCompression(**SOON), ScaleLoss(init_scale=1.0, dynamic=False), dampening=0.3)
before = flat(skipping[0]).clone()
for _ in range(2):
    skipping[2](*batch(0), torch.tensor(float("inf") if rank == 1 else 0.0))
nothing = torch.equal(before, flat(skipping[0])) and not skipping[1].state_dict()["state"]
plain = fp32(DeepGradientCompression(**{**LATE, "rampup_begin_step": 10}), ScaleLoss(init_scale=1.0, dynamic=False))
for number in range(3):
    skipping[2](*batch(number), torch.tensor(0.0))
said["skipped"] = [nothing, same_on_all(skipping[0]), len(skipping[1].state_dict()["state"])]

# a few entries of each tensor are updated at them alone
sparse_update.FEWEST = 2
entries = fp32(DeepGradientCompression(**LATE), weight_decay=0.01)
for number in range(8):
    entries[2](*batch(number))
sparse_update.FEWEST = 64
dense = fp32(DeepGradientCompression(**LATE), weight_decay=0.01)
for number in range(8):
    dense[2](*batch(number))
calls = [str(node.target) for node in entries[2].program.graph.nodes]
said["entries"] = [any("sum_entries" in call for call in calls), bits(*entries) == bits(*dense)]
"""
