"""Captures that survive the process: what they depend on, how they are written, where they are kept.

In reading order: ``program_cache``, ``program_key``, ``cache_lookup``, ``stored_capture``, ``capture_content``,
``program_folder``, ``program_files``, ``checked_file``, ``stable_form``, ``code_form``, ``result_structure``,
``live_inputs``, ``stored_sizes``, ``save_captures``, ``shipped_captures``.
"""
