"""The OpenAI-compatible HTTP server: `run.serve` starts it, `app.create_app` is its ASGI application."""
