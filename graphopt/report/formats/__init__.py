"""Programs in other formats, by name; third parties add theirs through the entry point group ``graphopt.formats``.

In reading order: ``python``, ``dot``, ``model_explorer``, ``perfetto``, ``ranks_page``,
``advice_page``, ``plain_page``.
"""
