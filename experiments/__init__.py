"""The paper's figures and tables, each as a run part that leaves rows and a plot part that draws them."""
