"""What the cost model is made of: measuring, published figures, the roofline, links, and where figures are kept.

In reading order: ``cost``, ``measurements``, ``timing``, ``isolated_call``, ``calibration``, ``plausibility``,
``roofline``, ``bandwidth``, ``profiles``, ``profile_file``, ``device_names``, ``figures``.
"""
