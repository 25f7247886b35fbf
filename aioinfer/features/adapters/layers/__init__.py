"""The layers' half of adapters (LoRA): `slots` has the adapters on one rank's device, `products`
what they add to linear layers, `experts` what they add to experts, and `parts` the form of a slot.
`features.adapters` decides which adapter is in which slot."""
