"""A round is messages: the client side, the server side, and what goes between them."""
