"""What a user could take instead of this library, side by side with it: one module per kind of operation."""

from rivals import decoding, products, quantizers

OPERATIONS = {
    "quantizers": quantizers.operations,
    "products": products.operations,
    "decoding": decoding.operations,
}  # the name of a part -> its operations, all lengths divided by an argument
