"""What the command line understands; nothing here needs torch.

In comes ``argv``; out come options, or an error in one line with near names and an exit code. Start with
``command_line``. In reading order: ``command_line``, ``command_parser``, ``arguments``, ``command_arguments``,
``exchange_arguments``, ``named_files``, ``exit_codes``, ``completion``.
"""
