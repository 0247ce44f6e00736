"""Tables and differences as text.

In reading order: ``memory_table``, ``memory_chart``, ``memory_bands``, ``tensor_table``, ``candidate_table``,
``pass_table``, ``after_each_pass``, ``snapshots``, ``diff``, ``frontier_table``,
``advice_plot``, ``exchange_table``, ``precision_table``, ``comparison_table``.
"""
