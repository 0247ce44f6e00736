"""The border of a capture: what decides, beside the values of tensors, what eager mode does, and what becomes of it.

The same table is in ARCHITECTURE.md. ``guards/fingerprint.py`` and ``runtime/calls/captures.py`` hold what is part of
the signature, ``capture/effects/side_effects.py`` and ``capture/effects/checks.py`` what is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BORDER", "Row"]

How = Literal["signature", "traced", "honoured", "refused", "told", "at the capture"]
Compiled = Literal["", "guarded", "honoured", "refused", "told", "no such thing"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing at the border.

    Attributes:
        what: the thing.
        how: ``signature`` (a call where it differs is captured on its own), ``traced`` (its ops are in the program),
            ``honoured`` (it acts around the program as in eager mode), ``refused`` (an error names it), ``told`` (a
            warning names it) or ``at the capture`` (it happens then, and not at later calls).
        note: the details.
        compiled: the same behind ``torch.compile(backend="graphopt")``, where it is another: ``guarded`` (torch cuts
            anew at a call where it differs), or ``no such thing`` for what is of a whole step; empty for alike.
        compiled_note: the details.
    """

    what: str
    how: How
    note: str = ""
    compiled: Compiled = ""
    compiled_note: str = ""


BORDER = (
    Row(
        "shapes, dtypes, devices, strides of arguments, and whether they are conjugate or negative views",
        "signature",
        "sizes that vary share a program, from the second size on",
        compiled="guarded",
        compiled_note="sizes that vary have a program each, up to 64; then a warning, or with a budget an error",
    ),
    Row("which arguments are the same tensor or share memory", "signature", compiled="guarded"),
    Row("`requires_grad` of arguments and parameters", "signature", compiled="guarded"),
    Row(
        "arguments that are no tensors",
        "signature",
        "by value: types, signs of zero, what containers hold",
        compiled="guarded",
        compiled_note="numbers share a program where a tensor gives their bits; the order of `**kwargs` counts, and "
        "the sign of zero",
    ),
    Row(
        "arguments that share memory, where forward writes to one of them",
        "refused",
        "a drop-in model runs in eager mode; written arguments that lie beside each other in one memory are traced",
    ),
    Row(
        "arguments of a class of tensors that adds nothing to how torch computes",
        "traced",
        "by their data, results with the class that eager mode gives them; where the code looks at the class, its "
        "members among it, a whole step refuses them, and a drop-in model is captured in parts",
    ),
    Row(
        "arguments and parameters of a class of tensors with rules of its own (`__torch_function__`, "
        "`__torch_dispatch__`, operators), nested tensors, packed sequences",
        "refused",
        "a drop-in model is captured in parts, and runs in eager mode where these cannot be captured either",
    ),
    Row(
        "sparse gradients of embeddings, running averages of norms with `momentum=None`",
        "refused",
        "a drop-in model runs these parts in eager mode",
    ),
    Row(
        "masks and positions that a model of `transformers` looks at",
        "signature",
        "by the answer: hides nothing, counts up; where ranks train together the mask stays, and a warning says so",
        compiled="told",
        compiled_note="the mask stays, which rounds otherwise where it hides nothing",
    ),
    Row("parameters and buffers: presence, dtype, device, shape, strides, sharing", "signature", compiled="guarded"),
    Row("training flags of all modules", "signature", compiled="guarded"),
    Row(
        "plain attributes of modules, and what is in them: containers, configs, arrays of NumPy, objects with "
        "`__slots__`, weak references, attributes of classes and functions of the user's",
        "signature",
        "by value, objects six levels deep; set on the given model or on the optimized one, they are one; lists above "
        "100,000 items and arrays above 4 MB are told, since changes inside of them are not noticed",
        compiled="guarded",
        compiled_note="not the order of dictionaries, nor attributes that objects get where code asks for them",
    ),
    Row(
        "variables that the code of the model or the loss reads: global ones, closures, defaults, attributes of "
        "classes, metaclasses, descriptors and functions, objects of methods, modules that functions import, the "
        "environment, the context (`contextvars`), names that it gives as texts (`getattr`, `globals()`, "
        "`sys.modules`); code put in the place of other code, a library's functions too",
        "signature",
        "by value, in functions of the user's own files; a name that is "
        "put together while code runs is found by how it begins, one that comes from elsewhere among all texts of "
        "that code, of what it reads and of the model",
        compiled="guarded",
        compiled_note="not attributes of metaclasses, nor those that objects get where code asks for them",
    ),
    Row(
        "variables that the code of installed libraries reads, in functions that layers and the user's code call, and "
        "in those that these call: numbers, texts, flags and small containers of them, in modules, classes, objects, "
        "closures, defaults and the environment; functions put in the place of others there",
        "signature",
        "not what torch and Python's own library read, beside the settings in this table, and not what the library's "
        "code changes itself while it is captured: its counts and caches; a warning says where a library has more than "
        "2,000 such functions",
        compiled="guarded",
    ),
    Row(
        "classes: that of an object, bases, classes that are registered with abstract ones; methods that others are "
        "put in the place of, the model's, its layers' `forward`, those of tensors, and functions of Python's",
        "signature",
        "what is set on the class of an optimized model is set on the class that it was made from",
        compiled="guarded",
        compiled_note="methods by us, those of libraries' layers and of tensors too",
    ),
    Row(
        "numbers that Python reads of tensors which are no arguments (`self.factor.item()`)",
        "signature",
        "up to 1,024 of a tensor by value, of larger tensors and on devices by whether ops have written to them; a "
        "warning names the line where they keep changing, and the capture is not stored",
        compiled="honoured",
        compiled_note="torch cuts there",
    ),
    Row(
        "attributes that Python has set on an argument (`mask.causal = True`)",
        "signature",
        "but for tensors",
        compiled="guarded",
    ),
    Row(
        "modules replaced, added, removed, of another class; modules kept in plain containers",
        "signature",
        compiled="guarded",
    ),
    Row(
        "forward hooks and pre-hooks of submodules, and of all modules",
        "traced",
        "with them in the signature",
        compiled_note="and guarded: for the whole process torch is set to look at those of modules "
        "(`skip_nnmodule_hook_guards = False`)",
    ),
    Row(
        "hooks of the model itself",
        "honoured",
        "they act around the program, whichever of the two models they are set on",
    ),
    Row(
        "a `forward` that is set on the model, before or after `optimize`",
        "traced",
        "with it in the signature",
        compiled="guarded",
    ),
    Row(
        "backward hooks of submodules, and of all modules",
        "refused",
        compiled="honoured",
        compiled_note="with those of all modules graphs run in eager mode, and a warning says so",
    ),
    Row(
        "`register_hook` on a tensor inside of forward",
        "refused",
        compiled="honoured",
        compiled_note="such a graph runs in eager mode, and a warning says so",
    ),
    Row(
        "hooks on parameters, post-accumulate hooks",
        "honoured",
        "with `optimize`, behind the whole backward; a warning says that those of different parameters run in another "
        "order, and on None where a program has several results and the loss needs no gradient of a parameter; a whole "
        "step refuses them",
        compiled_note="the warning is for hooks that are there when a graph is captured",
    ),
    Row(
        "hooks of the optimizer",
        "honoured",
        "in a whole step its update then runs in eager mode",
        compiled="no such thing",
    ),
    Row(
        "what an optimizer reads or keeps in Python",
        "honoured",
        "its update runs in eager mode, and a warning says so",
        compiled="no such thing",
    ),
    Row(
        "parameters and buffers of the model that code holds elsewhere: in lists, in closures of a loss",
        "traced",
        "they are the same inputs",
    ),
    Row(
        "other tensors that require gradients: of modules in plain lists, of a loss with parameters of its own",
        "refused",
        "where an optimizer holds them, else told; a drop-in model is captured in parts, which have their gradients",
        compiled="honoured",
        compiled_note="they are inputs of graphs",
    ),
    Row(
        "parameters that require gradients and that the optimizer does not hold",
        "told",
        "a whole step computes no gradients for them",
        compiled="no such thing",
    ),
    Row(
        "parameters that are replaced in the model and not in the optimizer",
        "refused",
        "by a whole step; with `optimize` the optimizer is the loop's",
        compiled="no such thing",
    ),
    Row("saved-tensor hooks of the caller", "honoured", "for what the program keeps; a capture runs without them"),
    Row(
        "`no_grad`, `inference_mode` around the call",
        "honoured",
        "a drop-in model runs plainly, a step gives the loss and trains nothing",
    ),
    Row(
        "transforms of `torch.func`, forward-mode differentiation, `functional_call` with other parameters",
        "told",
        "a drop-in model runs in eager mode there",
        compiled="honoured",
        compiled_note="as torch does it",
    ),
    Row(
        "transforms of `torch.func` inside of forward",
        "refused",
        "where they compute gradients (`grad`, `vjp`, `jacrev`, `hessian`): a drop-in model runs that part as it is; "
        "`vmap`, `jvp` and `jacfwd` are traced",
        compiled_note="a graph runs in eager mode",
    ),
    Row(
        "`torch.nn.utils.parametrize.cached()` around calls",
        "told",
        "a drop-in model runs in eager mode there; a step keeps parametrized tensors for its own call",
        compiled="honoured",
        compiled_note="as torch does it",
    ),
    Row("second derivatives", "refused", "of a drop-in model; first ones may be taken with `create_graph=True`"),
    Row("several gradients at once (`is_grads_batched=True`)", "refused", "of a drop-in model"),
    Row(
        "`torch.autograd.grad` inside of forward or of a loss",
        "honoured",
        "part of the program, differentiated with the rest; `backward()` there is refused, and so is an argument to "
        "which only forward gives `requires_grad`",
        compiled="refused",
    ),
    Row("autocast around the call", "signature", "and its casts are traced", compiled="guarded"),
    Row(
        "deterministic algorithms, default dtype and device, matmul precision, kernels for attention, oneDNN",
        "signature",
        compiled="guarded",
        compiled_note="by us, where torch does not",
    ),
    Row("anomaly mode", "signature", compiled="guarded", compiled_note="by us"),
    Row("random numbers inside of forward", "traced", "and the generator ends where eager mode leaves it"),
    Row(
        "seeds inside of forward, and states of random generators that it sets",
        "refused",
        compiled="honoured",
        compiled_note="torch cuts there",
    ),
    Row(
        "numbers that forward draws from Python's `random` or NumPy's, or from such generators of the user's own",
        "refused",
        "a drop-in model is captured in parts, and runs in eager mode where it keeps a `random.Random`",
        compiled="honoured",
    ),
    Row(
        "random bytes of the operating system inside of forward (`os.urandom`, `uuid`, `secrets`)",
        "refused",
        "a drop-in model is captured in parts",
        compiled="honoured",
        compiled_note="torch cuts there",
    ),
    Row(
        "gradients (`.grad`) of parameters or arguments that forward or a loss reads, and counts of writes to them",
        "refused",
        "a drop-in model is captured in parts, and runs in eager mode for counts",
        compiled="honoured",
    ),
    Row(
        "the clock, settings of the process (threads, free memory, folder, arguments), "
        "`torch.compiler.is_compiling()`, comparisons of `type(...)` with a class of tensors, functions of TorchScript",
        "told",
        "in functions of the user's own files: a program has the time of its capture; while it is captured the answer "
        "is true, as under `torch.compile`, and tensors are of other classes; TorchScript's own derivatives may round "
        "otherwise",
        compiled="honoured",
        compiled_note="torch cuts there; `is_compiling()` is told",
    ),
    Row(
        "iterators that forward or a loss takes from, kept or given as an argument",
        "refused",
        "before an item is gone; a drop-in model is captured in parts",
        compiled="honoured",
    ),
    Row(
        "`inference_mode` inside of forward",
        "refused",
        "a drop-in model is captured in parts",
        compiled="honoured",
        compiled_note="such a graph runs in eager mode, and a warning says so",
    ),
    Row(
        "changes of parameters inside of forward (`.data`, `.detach()`, `no_grad`, `max_norm`)",
        "traced",
        "refused where backward needs the parameter as it was",
    ),
    Row("writes of forward into tensors that are no buffers", "traced", "the capture itself leaves them as they are"),
    Row(
        "attributes that forward sets",
        "told",
        "numbers and texts that the first call sets stay set",
        compiled="honoured",
    ),
    Row(
        "numbers and texts that forward or a loss puts into containers, objects and variables outside of the model, "
        "and entries that it takes from its arguments",
        "told",
        "in functions of the user's own files, up to 20,000 containers and objects",
        compiled="honoured",
    ),
    Row(
        "tensors that forward or a loss puts there, into its arguments, or into a result of a class of its own",
        "honoured",
        "a drop-in model is captured in parts; a whole step refuses it, and leaves there what was there",
        compiled="honoured",
    ),
    Row(
        "caches of keys and values in the result of a model of `transformers`",
        "told",
        "None in their place",
        compiled="honoured",
    ),
    Row("a `__call__` of the model's class", "honoured", "it acts around the program; a whole step traces it"),
    Row("attributes of modules in `__slots__`", "refused", compiled="guarded"),
    Row("checks of values inside of ops, such as `torch.linalg.inv`'s", "traced", "they raise as in eager mode"),
    Row(
        "files that forward or a loss reads, writes or looks for, what it prints and logs, programs that it runs",
        "told",
        "with the line; it happens at the capture, and a capture for which something was read is not stored",
        compiled="honoured",
        compiled_note="torch cuts there",
    ),
    Row(
        "other effects of forward outside of torch: what libraries do, sockets, device files",
        "at the capture",
        "none where it was stored before",
        compiled="honoured",
        compiled_note="torch cuts where it cannot read code",
    ),
    Row(
        "`assert` and `if …: raise` on values",
        "traced",
        "as ops; what is raised is what eager mode raises",
        compiled="honoured",
        compiled_note="torch cuts there",
    ),
    Row(
        "other control flow that depends on values, tensors kept in attributes",
        "honoured",
        "a drop-in model is captured in parts, with eager code between them; a whole step refuses it",
        compiled="honoured",
        compiled_note="torch cuts there",
    ),
    Row(
        "sparse arguments in compressed rows or columns, `while_loop`",
        "refused",
        "a drop-in model runs in eager mode",
        compiled_note="such a graph runs in eager mode",
    ),
    Row(
        "what a call raises in eager mode",
        "honoured",
        "the same exception, from every door, where it cannot be captured or its program fails; for that the call is "
        "run once more, on data, and what it does is taken back",
    ),
    Row("outputs that the caller keeps", "honoured", "their bytes are counted until backward ends"),
    Row(
        "outputs that a loss leaves out",
        "honoured",
        "backward computes nothing for them, where `torch.compile` takes their gradients for zeros; what cannot be "
        "differentiated in them is refused",
    ),
    Row(
        "gradients that are left where backward raises",
        "told",
        "none of that program's, in a note on the error, where eager mode leaves those of the last layers; where a "
        "hook on a parameter raises, those of parameters whose turn came before, in another order than there",
    ),
    Row(
        "results that are views of one tensor which forward reads too",
        "told",
        "torch adds up their gradients outside of the program, in another order than eager mode",
    ),
    Row(
        "segments of `torch.utils.checkpoint`",
        "traced",
        "what they drop is recomputed; a warning names buffers that eager mode updates a second time then",
    ),
    Row(
        "random ops under `checkpoint(preserve_rng_state=False)`, selective checkpointing (`context_fn`)",
        "refused",
        "a drop-in model runs the former as they are, with eager mode's other numbers in backward",
    ),
    Row(
        "models after `fully_shard` (FSDP2)",
        "traced",
        "gathers and reductions are ops; what is not done is refused at the capture; a warning names "
        "`set_requires_gradient_sync(False)` in a whole step or beside tensor parallelism, and "
        "`set_requires_all_reduce(False)`",
        compiled="honoured",
        compiled_note="FSDP2's hooks run between the graphs, which get whole parameters",
    ),
    Row(
        "models that `DistributedDataParallel` wraps",
        "honoured",
        "`optimize` optimizes what is inside; a whole step refuses the wrapper",
        compiled="honoured",
        compiled_note="torch's Dynamo cuts what is inside",
    ),
    Row(
        "parameters that are `DTensor`s (`parallelize_module`), and arguments beside them",
        "traced",
        "in `optimize`, `optimize_step` and `capture`; their collectives are ops; each size is captured by itself",
        compiled="told",
        compiled_note="torch's graph takes the mesh, and runs in eager mode",
    ),
    Row(
        "models that `torch.compile`, FSDP or DataParallel wraps; arguments that are `DTensor`s where no parameter is",
        "refused",
    ),
    Row("what a loss outside of a drop-in model allocates", "told", "it is not part of a budget; the record says so"),
)
"""Every row; what is not in it is read at the capture."""
