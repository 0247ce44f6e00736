"""Guards: what a program is valid for, beside the values of tensors.

In come the user's objects and code, which is read and never run; out come keys that are equal as long as the program
may be used. Start with ``fingerprint``, the key of a model; ``code_analysis`` finds the variables that code reads. In
reading order: ``fingerprint``, ``contents``, ``code_analysis``, ``loaded_names``, ``reachable_values``,
``variables``, ``found_variables``, ``variable_guards``, ``library_code``, ``impure_calls``, ``code_owner``,
``named_values``, ``locations``, ``slots``.
"""
