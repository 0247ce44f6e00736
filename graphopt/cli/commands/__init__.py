"""One file for each command: options in, text, data or a file out.

``plan`` is the longest; ``looking`` holds those that show what there is. In reading order: ``plan``, ``advise``,
``exchange``, ``memory``, ``tensors``, ``compare``, ``view``, ``profile``, ``cache``, ``looking``, ``words``.
"""
