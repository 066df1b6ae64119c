"""Says what of a batch is whose: forward's, the loss's, a metric's; and applies the collate."""
