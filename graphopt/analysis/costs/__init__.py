"""What the cost model is made of: measuring, published figures, the roofline, links, and where figures are kept."""
