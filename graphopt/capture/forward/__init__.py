"""nn.Module (+ loss) → forward program, by ``torch.export``.

In come a model, a loss and a call; out come a graph of aten ops with names, modules and source lines. Start with
``traced_call``, which has the call exported, then ``export``, which makes a program of that. In reading order:
``traced_call``, ``export``, ``regions``, ``inner_gradients``, ``value_checks``, ``transformers_masks``,
``untraceable``.
"""
