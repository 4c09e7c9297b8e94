"""The words that recall books are made of. Each is a single token of the built-in tokenizer."""

NAMES: tuple[str, ...] = tuple(
    "Agnes Albert Alice Anton Astrid Boris Bruno Carla Cecil Clara Conrad Daisy Derek Dora Edgar Edith Elmer Elsa Emil "
    "Ernest Fabian Felix Fiona Flora Frank Gerda Gilbert Gloria Greta Gustav Hanna Harold Hector Heidi Helga Herbert "
    "Hilda Hugo Ingrid Irene Ivan Jasper Julia Karin Klara Konrad Leonard Linda Lorenz Louise Magnus Marta Maurice "
    "Nadia Nelson Norma Olga Oscar Otto Pavel Petra Quentin Ralph Rosa".split()
)
NOUNS: tuple[str, ...] = tuple(
    "anchor arrow badge barrel basket beacon blanket bottle bridge broom bucket button cabin candle carpet castle "
    "cherry clock compass copper cradle crown curtain diamond drum engine feather flute garden glove hammer harbor "
    "jacket jewel kettle kite ladder lantern lemon lion marble meadow mirror needle orchard oven paddle paper pepper "
    "pillow planet pocket ribbon saddle shadow spoon statue table tunnel turtle violin wagon window wolf".split()
)
ADJECTIVES: tuple[str, ...] = tuple(
    "amber ancient bitter bold brave bright brisk calm clever cold curious dark dusty eager early empty fancy fierce "
    "frozen gentle giant golden grand hasty heavy hollow honest humble icy jolly keen lazy lively lonely loud lucky "
    "mellow mighty modest narrow noble orange patient plain polite proud purple quiet rapid rough royal rustic shiny "
    "silent silver simple slow smooth solemn steep strange sunny tall yellow".split()
)
VARIABLES: tuple[str, ...] = tuple(first + second for first in "BCDFGHJK" for second in "LMNPQRST")
# The filler of RULER's first needle task, arXiv:2404.06654.
NOISE: tuple[str, ...] = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
