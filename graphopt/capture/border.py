"""The border of a capture: what decides, beside the values of tensors, what eager mode does, and what becomes of it.

The same table is in CONTRIBUTING.md. ``capture/fingerprint.py`` and ``runtime/signature.py`` hold what is part of the
signature, ``capture/hidden_effects.py`` and ``capture/checks.py`` what is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BORDER", "Row"]

How = Literal["signature", "traced", "honoured", "refused", "told", "at the capture"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing at the border.

    Attributes:
        what: the thing.
        how: ``signature`` (a call where it differs is captured on its own), ``traced`` (its ops are in the program),
            ``honoured`` (it acts around the program as in eager mode), ``refused`` (an error names it), ``told`` (a
            warning names it) or ``at the capture`` (it happens then, and not at later calls).
        note: the details.
    """

    what: str
    how: How
    note: str = ""


BORDER = (
    Row(
        "shapes, dtypes, devices, strides of arguments, and whether they are conjugate or negative views",
        "signature",
        "sizes that vary share a program, from the second size on",
    ),
    Row("which arguments are the same tensor or share memory", "signature"),
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
    Row("`requires_grad` of arguments and parameters", "signature"),
    Row("arguments that are no tensors", "signature", "by value: types, signs of zero, what containers hold"),
    Row(
        "masks and positions that a model of `transformers` looks at",
        "signature",
        "by the answer: hides nothing, counts up; where ranks train together the mask stays, and a warning says so",
    ),
    Row("parameters and buffers: presence, dtype, device, shape, strides, sharing", "signature"),
    Row("training flags of all modules", "signature"),
    Row(
        "plain attributes of modules, and what is in them: containers, configs, arrays of NumPy, objects with "
        "`__slots__`, weak references, attributes of classes and functions of the user's",
        "signature",
        "by value, objects six levels deep; set on the given model or on the optimized one, they are one; lists above "
        "100,000 items and arrays above 4 MB are told, since changes inside of them are not noticed",
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
    ),
    Row(
        "variables that the code of installed libraries reads, in functions that layers and the user's code call, and "
        "in those that these call: numbers, texts, flags and small containers of them, in modules, classes, objects, "
        "closures, defaults and the environment; functions put in the place of others there",
        "signature",
        "not what torch and Python's own library read, beside the settings in this table, and not what the library's "
        "code changes itself while it is captured: its counts and caches; a warning says where a library has more than "
        "2,000 such functions",
    ),
    Row(
        "classes: that of an object, bases, classes that are registered with abstract ones; methods that others are "
        "put in the place of, the model's, its layers' `forward`, those of tensors, and functions of Python's",
        "signature",
        "what is set on the class of an optimized model is set on the class that it was made from",
    ),
    Row(
        "numbers that Python reads of tensors which are no arguments (`self.factor.item()`)",
        "signature",
        "up to 1,024 of a tensor by value, of larger tensors and on devices by whether ops have written to them; a "
        "warning names the line where they keep changing, and the capture is not stored",
    ),
    Row("attributes that Python has set on an argument (`mask.causal = True`)", "signature", "but for tensors"),
    Row("modules replaced, added, removed, of another class; modules kept in plain containers", "signature"),
    Row("forward hooks and pre-hooks of submodules, and of all modules", "traced", "with them in the signature"),
    Row(
        "hooks of the model itself",
        "honoured",
        "they act around the program, whichever of the two models they are set on",
    ),
    Row("a `forward` that is set on the model, before or after `optimize`", "traced", "with it in the signature"),
    Row("backward hooks of submodules, and of all modules", "refused"),
    Row("`register_hook` on a tensor inside of forward", "refused"),
    Row("hooks on parameters, post-accumulate hooks", "honoured", "with `optimize`; a whole step refuses them"),
    Row("hooks of the optimizer", "honoured", "in a whole step its update then runs as it is"),
    Row("what an optimizer reads or keeps in Python", "honoured", "its update runs as it is, and a warning says so"),
    Row(
        "parameters and buffers of the model that code holds elsewhere: in lists, in closures of a loss",
        "traced",
        "they are the same inputs",
    ),
    Row(
        "other tensors that require gradients: of modules in plain lists, of a loss with parameters of its own",
        "refused",
        "where an optimizer holds them, else told; a drop-in model is captured in parts, which have their gradients",
    ),
    Row(
        "parameters that require gradients and that the optimizer does not hold",
        "told",
        "a whole step computes no gradients for them",
    ),
    Row(
        "parameters that are replaced in the model and not in the optimizer",
        "refused",
        "by a whole step; with `optimize` the optimizer is the loop's",
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
    ),
    Row(
        "transforms of `torch.func` inside of forward",
        "refused",
        "where they compute gradients (`grad`, `vjp`, `jacrev`, `hessian`): a drop-in model runs that part as it is; "
        "`vmap`, `jvp` and `jacfwd` are traced",
    ),
    Row(
        "`torch.nn.utils.parametrize.cached()` around calls",
        "told",
        "a drop-in model runs in eager mode there; a step keeps parametrized tensors for its own call",
    ),
    Row("second derivatives", "refused", "of a drop-in model; first ones may be taken with `create_graph=True`"),
    Row("several gradients at once (`is_grads_batched=True`)", "refused", "of a drop-in model"),
    Row(
        "`torch.autograd.grad` inside of forward or of a loss",
        "honoured",
        "part of the program, differentiated with the rest; `backward()` there is refused, and so is an argument to "
        "which only forward gives `requires_grad`",
    ),
    Row("autocast around the call", "signature", "and its casts are traced"),
    Row(
        "deterministic algorithms, default dtype and device, matmul precision, kernels for attention, oneDNN",
        "signature",
    ),
    Row("anomaly mode", "signature"),
    Row("random numbers inside of forward", "traced", "and the generator ends where eager mode leaves it"),
    Row("seeds inside of forward, and states of random generators that it sets", "refused"),
    Row(
        "numbers that forward draws from Python's `random` or NumPy's, or from such generators of the user's own",
        "refused",
        "a drop-in model is captured in parts, and runs in eager mode where it keeps a `random.Random`",
    ),
    Row(
        "random bytes of the operating system inside of forward (`os.urandom`, `uuid`, `secrets`)",
        "refused",
        "a drop-in model is captured in parts",
    ),
    Row(
        "gradients (`.grad`) of parameters or arguments that forward or a loss reads, and counts of writes to them",
        "refused",
        "a drop-in model is captured in parts, and runs in eager mode for counts",
    ),
    Row(
        "the clock, settings of the process (threads, free memory, folder, arguments), "
        "`torch.compiler.is_compiling()`, comparisons of `type(...)` with a class of tensors, functions of TorchScript",
        "told",
        "in functions of the user's own files: a program has the time of its capture; while it is captured the answer "
        "is true, as under `torch.compile`, and tensors are of other classes; TorchScript's own derivatives may round "
        "otherwise",
    ),
    Row(
        "iterators that forward or a loss takes from, kept or given as an argument",
        "refused",
        "before an item is gone; a drop-in model is captured in parts",
    ),
    Row("`inference_mode` inside of forward", "refused", "a drop-in model is captured in parts"),
    Row(
        "changes of parameters inside of forward (`.data`, `.detach()`, `no_grad`, `max_norm`)",
        "traced",
        "refused where backward needs the parameter as it was",
    ),
    Row("writes of forward into tensors that are no buffers", "traced", "the capture itself leaves them as they are"),
    Row("attributes that forward sets", "told", "numbers and texts that the first call sets stay set"),
    Row(
        "numbers and texts that forward or a loss puts into containers, objects and variables outside of the model, "
        "and entries that it takes from its arguments",
        "told",
        "in functions of the user's own files, up to 20,000 containers and objects",
    ),
    Row(
        "tensors that forward or a loss puts there, into its arguments, or into a result of a class of its own",
        "honoured",
        "a drop-in model is captured in parts; a whole step refuses it, and leaves there what was there",
    ),
    Row("caches of keys and values in the result of a model of `transformers`", "told", "None in their place"),
    Row("a `__call__` of the model's class", "honoured", "it acts around the program; a whole step traces it"),
    Row("attributes of modules in `__slots__`", "refused"),
    Row("checks of values inside of ops, such as `torch.linalg.inv`'s", "traced", "they raise as in eager mode"),
    Row(
        "files that forward or a loss reads, writes or looks for, what it prints and logs, programs that it runs",
        "told",
        "with the line; it happens at the capture, and a capture for which something was read is not stored",
    ),
    Row(
        "other effects of forward outside of torch: what libraries do, sockets, device files",
        "at the capture",
        "none where it was stored before",
    ),
    Row("`assert` and `if …: raise` on values", "traced", "as ops that raise the same, with the source line"),
    Row(
        "other control flow that depends on values, tensors kept in attributes",
        "honoured",
        "a drop-in model is captured in parts, with eager code between them; a whole step refuses it",
    ),
    Row(
        "sparse arguments in compressed rows or columns, `while_loop`",
        "refused",
        "a drop-in model runs in eager mode",
    ),
    Row("outputs that the caller keeps", "honoured", "their bytes are counted until backward ends"),
    Row(
        "outputs that a loss leaves out",
        "honoured",
        "backward computes nothing for them, where `torch.compile` takes their gradients for zeros; what cannot be "
        "differentiated in them is refused",
    ),
    Row(
        "results that are views of one tensor which forward reads too",
        "told",
        "torch adds up their gradients outside of the program, in another order than eager mode",
    ),
    Row("what a loss outside of a drop-in model allocates", "told", "it is not part of a budget; the record says so"),
)
"""Every row; what is not in it is read at the capture."""
