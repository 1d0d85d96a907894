"""`fedloom watch`: a local web page that follows runs.

It reads what runs write and asks them to stop; it imports no torch and runs no method. Starlette
and uvicorn are the extra `watch`.
"""
