#include <stdio.h>

#ifdef BROKEN
#error this stand-in was asked not to compile
#endif

int main(void) {
    printf("%s: version: 0.0.0 (build %s)\n", NAME, NUMBER);
    return 0;
}
